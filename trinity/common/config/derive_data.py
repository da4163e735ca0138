"""Open values of `buffer:` and `data_processor:`."""

from __future__ import annotations

import os

from trinity.common.config.algorithm_table import AlgorithmSpec
from trinity.common.config.buffer import ExperienceBufferConfig, TasksetConfig
from trinity.common.config.fill import Filler
from trinity.common.config.service import DataJuicerServiceConfig
from trinity.common.constants import Mode, StorageType

INPUT = "buffer.explorer_input"
_NO_HURRY_S = 10 * 365 * 86400.0
EXPERIENCES = "buffer.trainer_input.experience_buffer"
ROLLOUT = "explorer.rollout_model"
_WORKFLOW = "math_workflow"
_WORKFLOW_WITH_REWARD = "simple_workflow"
_WORKFLOW_OF = {
    StorageType.REASONING_GYM: "reasoning_gym_workflow",
    StorageType.VERIFIERS: "verifiers_workflow",
}


def derive_data(filler: Filler, spec: AlgorithmSpec) -> None:
    """Fill in batch sizes, tasksets, experience buffers and pipelines."""
    _derive_batch(filler, spec)
    _derive_tasksets(filler)
    _derive_experience_buffer(filler, spec)
    _derive_auxiliary_buffers(filler, spec)
    _derive_pipelines(filler)


def _derive_batch(filler: Filler, spec: AlgorithmSpec) -> None:
    config = filler.config
    if spec.schema != "experience":
        return
    tasks, repeats = config.buffer.batch_size, config.algorithm.repeat_times or 1
    why = f"batch_size {tasks} * repeat_times {repeats}"
    filler.default("buffer.train_batch_size", tasks * repeats, why)


def _derive_tasksets(filler: Filler) -> None:
    tasks = filler.config.buffer.explorer_input
    if tasks.taskset is not None and not tasks.tasksets:
        tasks.tasksets = [tasks.taskset]
        tasks.taskset = None
    pipeline = filler.config.data_processor.task_pipeline
    if not tasks.tasksets and pipeline is not None and pipeline.output is not None:
        tasks.tasksets = [pipeline.output.model_copy(deep=True)]
    for index, taskset in enumerate(tasks.tasksets):
        key = f"{INPUT}.tasksets.{index}"
        filler.default(f"{key}.name", f"taskset_{index}", "by position")
        filler.copy(f"{key}.repeat_times", "algorithm.repeat_times")
        _derive_taskset(filler, key, taskset, tasks.default_workflow_type)
    for index, taskset in enumerate(tasks.eval_tasksets):
        key = f"{INPUT}.eval_tasksets.{index}"
        filler.default(f"{key}.name", f"eval_taskset_{index}", "by position")
        filler.default(f"{key}.repeat_times", 1, "one sample of each task when evaluating")
        workflow = tasks.default_eval_workflow_type or tasks.default_workflow_type
        _derive_taskset(filler, key, taskset, workflow)


def _derive_taskset(filler: Filler, key: str, taskset: TasksetConfig, workflow: str | None) -> None:
    filler.copy(f"{key}.default_reward_fn_type", f"{INPUT}.default_reward_fn_type")
    filler.default(f"{key}.default_workflow_type", workflow, f"as in {INPUT}")
    if not taskset.format.workflow_key:
        filler.default(f"{key}.default_workflow_type", *_usual_workflow(taskset))
    for name in ("temperature", "top_p", "top_k", "logprobs"):
        filler.lend(f"{key}.rollout_args.{name}", f"{ROLLOUT}.{name}")  # workflows have their own
    filler.copy(f"{key}.rollout_args.max_tokens", f"{ROLLOUT}.max_response_tokens")
    _derive_format(filler, key)


def _usual_workflow(taskset: TasksetConfig) -> tuple[str, str]:
    if taskset.storage_type in _WORKFLOW_OF:
        return _WORKFLOW_OF[taskset.storage_type], "the tasks bring their own reward"
    if taskset.default_reward_fn_type:
        return _WORKFLOW_WITH_REWARD, "no workflow is named, but a reward function is"
    return _WORKFLOW, "no workflow is named"


def _derive_format(filler: Filler, key: str) -> None:
    filler.copy(f"{key}.format.chat_template", "model.custom_chat_template")
    filler.copy(f"{key}.format.enable_thinking", "model.enable_thinking")


def _derive_experience_buffer(filler: Filler, spec: AlgorithmSpec) -> None:
    config = filler.config
    if config.mode is Mode.BENCH:
        return
    output = config.data_processor.experience_pipeline.output
    if output is not None and config.buffer.trainer_input.experience_buffer is None:
        why = "as data_processor.experience_pipeline.output"
        filler.put(EXPERIENCES, output.model_copy(deep=True), why, is_copy=True)
    if config.buffer.trainer_input.experience_buffer is None:
        config.buffer.trainer_input.experience_buffer = ExperienceBufferConfig()
    filler.default(f"{EXPERIENCES}.name", "experience_buffer", "by position")
    buffer = config.buffer.trainer_input.experience_buffer
    assert buffer is not None
    filler.default(f"{EXPERIENCES}.storage_type", *_usual_storage(buffer, spec))
    filler.default(f"{EXPERIENCES}.schema_type", spec.schema, "by algorithm")
    _derive_path(filler, EXPERIENCES, buffer)
    if config.mode is Mode.SERVE:
        _derive_serving(filler)
    _derive_capacity(filler, buffer)
    filler.copy(f"{EXPERIENCES}.total_epochs", "buffer.total_epochs")
    _derive_format(filler, EXPERIENCES)


def _derive_serving(filler: Filler) -> None:
    key = f"{EXPERIENCES}.max_read_timeout"
    if not filler.is_set(key):
        filler.put(key, _NO_HURRY_S, "users may be away for long")
    folder = os.path.join(filler.config.checkpoint_job_dir, "buffer")
    filler.default("explorer.db_url", f"sqlite:///{folder}/proxy_history.db", "in the job's folder")


def _derive_capacity(filler: Filler, buffer: ExperienceBufferConfig) -> None:
    key, needed = f"{EXPERIENCES}.capacity", 2 * filler.config.buffer.train_batch_size
    is_queue = buffer.storage_type is StorageType.QUEUE
    if is_queue and not filler.is_set(key) and buffer.capacity < needed:
        filler.put(key, needed, "room for two training steps")


def _usual_storage(buffer: ExperienceBufferConfig, spec: AlgorithmSpec) -> tuple[StorageType, str]:
    if spec.schema == "experience":
        return StorageType.QUEUE, "the usual way from explorer to trainer"
    if "://" in (buffer.path or ""):
        return StorageType.SQL, "the path is a database"
    return StorageType.FILE, f"{spec.schema} trains on a data set"


def _derive_path(filler: Filler, key: str, buffer: ExperienceBufferConfig) -> None:
    folder = os.path.join(filler.config.checkpoint_job_dir, "buffer")
    if buffer.storage_type is StorageType.SQL:
        filler.default(f"{key}.path", f"sqlite:///{folder}/{buffer.name}.db", "in the job's folder")
    elif buffer.storage_type is StorageType.FILE and buffer.schema_type == "experience":
        filler.default(f"{key}.path", f"{folder}/{buffer.name}.jsonl", "in the job's folder")


def _derive_auxiliary_buffers(filler: Filler, spec: AlgorithmSpec) -> None:
    mixes = filler.config.algorithm.sample_strategy == "mix"
    args = filler.config.algorithm.sample_strategy_args or {}
    expert = args.get("sft_dataset_name", "sft_dataset") if mixes else None
    for name, buffer in filler.config.buffer.trainer_input.auxiliary_buffers.items():
        key = f"buffer.trainer_input.auxiliary_buffers.{name}"
        filler.default(f"{key}.name", name, "by its key")
        is_database = "://" in (buffer.path or "")
        storage = StorageType.SQL if is_database else StorageType.FILE
        filler.default(f"{key}.storage_type", storage, "by its path")
        schema = "sft" if name == expert else spec.schema
        filler.default(f"{key}.schema_type", schema, "by algorithm")
        filler.copy(f"{key}.total_epochs", "buffer.total_epochs")
        _derive_format(filler, key)


def _derive_pipelines(filler: Filler) -> None:
    config = filler.config
    pipeline = config.data_processor.experience_pipeline
    if pipeline.save_input and config.mode.explores and config.mode is not Mode.BENCH:
        path = f"sqlite:///{config.checkpoint_job_dir}/buffer/explorer_output.db"
        key = "data_processor.experience_pipeline.input_save_path"
        filler.default(key, path, "in the job's folder")
    _derive_service(filler)
    task_pipeline = config.data_processor.task_pipeline
    tasksets = config.buffer.explorer_input.tasksets
    if task_pipeline is not None and task_pipeline.output is None and tasksets:
        why = "the first training taskset"
        filler.put("data_processor.task_pipeline.output", tasksets[0].model_copy(deep=True), why)


def _derive_service(filler: Filler) -> None:
    """Whoever names an operator of Data-Juicer wants its service."""
    config = filler.config
    operators = config.data_processor.experience_pipeline.operators
    is_wanted = any(operator.name == "data_juicer" for operator in operators)
    if config.service.data_juicer is None and is_wanted:
        why = "an operator needs it"
        filler.put("service.data_juicer", DataJuicerServiceConfig(auto_start=True), why)
