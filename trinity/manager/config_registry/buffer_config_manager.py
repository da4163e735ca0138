"""Settings of the data: tasks, evaluation, experiences, and how many of them make a step."""

from typing import Any

import streamlit as st

from trinity.common.config.buffer import (
    BufferConfig,
    DataSelectorConfig,
    ExperienceBufferConfig,
    FormatConfig,
    TasksetConfig,
)
from trinity.common.config.names import builtin_names
from trinity.manager.config_registry.config_registry import CONFIG_GENERATORS
from trinity.manager.config_registry.fields import add_fields

TASKSET = ("path", "split", "subset_name", "default_workflow_type", "default_reward_fn_type")
EVAL = (*TASKSET, "repeat_times")
FORMAT = ("prompt_key", "response_key", "system_prompt")
EXPERIENCES = ("storage_type", "path", "max_read_timeout")

_TASKS = "buffer.explorer_input.taskset"
_EVALS = "buffer.explorer_input.eval_tasksets.0"
_NAMES = {
    "default_workflow_type": sorted(builtin_names()["WORKFLOWS"]),
    "default_reward_fn_type": sorted(builtin_names()["REWARD_FUNCTIONS"]),
}

add_fields("buffer", BufferConfig, ("batch_size", "total_epochs", "total_steps"))
add_fields(_TASKS, TasksetConfig, TASKSET, "taskset_", choices=_NAMES)
add_fields(f"{_TASKS}.format", FormatConfig, FORMAT, "taskset_")
add_fields(f"{_TASKS}.data_selector", DataSelectorConfig, ("selector_type", "seed"), "taskset_")
add_fields(_EVALS, TasksetConfig, EVAL, "eval_taskset_", choices=_NAMES)
add_fields(f"{_EVALS}.format", FormatConfig, FORMAT, "eval_taskset_")
add_fields(
    "buffer.trainer_input.experience_buffer", ExperienceBufferConfig, EXPERIENCES, "experience_"
)


def _advice() -> str:
    return (
        "`buffer.train_batch_size`: experiences of one training step. It has to be divisible by "
        f"the trainer's GPUs, which are {st.session_state['trainer_gpu_num']}."
    )


@CONFIG_GENERATORS.register_config(
    default_value=96,
    visible=lambda: st.session_state["trainer_gpu_num"] > 0,
    other_configs={"_train_batch_size_per_gpu": 16, "trainer_gpu_num": 0},
)
def set_train_batch_size(**kwargs: Any) -> None:
    """So many experiences for each GPU of the trainer, whose number may change."""
    key, gpus = kwargs["key"], st.session_state["trainer_gpu_num"]
    st.session_state[key] = st.session_state["_train_batch_size_per_gpu"] * gpus

    def on_change() -> None:
        each = st.session_state[key] // st.session_state["trainer_gpu_num"]
        st.session_state["_train_batch_size_per_gpu"] = max(each, 1)

    st.number_input(
        "Train batch size",
        min_value=gpus,
        step=gpus,
        help=_advice(),
        on_change=on_change,
        **kwargs,
    )


@CONFIG_GENERATORS.register_check()
def check_train_batch_size(unfinished_fields: set[str], key: str) -> None:
    """What the GPUs can't share evenly is not finished."""
    if st.session_state[key] % st.session_state["trainer_gpu_num"] != 0:
        unfinished_fields.add(key)
        st.warning(_advice())


@CONFIG_GENERATORS.register_check()
def check_taskset_path(unfinished_fields: set[str], key: str) -> None:
    """A run that explores needs tasks."""
    if st.session_state["mode"] != "train" and not st.session_state[key]:
        unfinished_fields.add(key)
        st.warning("Name the file, the folder or the hub's data set that holds the tasks.")
