"""Spellings of earlier releases -> today's, on the plain tree of a file, with one warning each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trinity.common.errors import Problem

VALUES = {
    "synchronizer.sync_method": {"online": "nccl", "offline": "checkpoint"},
    "synchronizer.sync_style": {
        "dynamic_by_explorer": "explorer_driven",
        "dynamic_by_trainer": "trainer_driven",
    },
    "algorithm.sample_strategy": {"warmup": "default"},
}
"""Key -> old value -> value of today."""

KEYS = {
    "algorithm.optimizer.warmup_style": "lr_scheduler_type",
    "buffer.explorer_input.taskset.task_selector": "data_selector",
    "buffer.explorer_input.tasksets.*.task_selector": "data_selector",
    "buffer.explorer_input.eval_tasksets.*.task_selector": "data_selector",
    "data_processor.task_pipeline.output.task_selector": "data_selector",
    "trainer.ppo_max_token_len_per_gpu": "max_token_len_per_gpu",
}
"""Key pattern -> its last part today."""

MOVED = {
    f"buffer.{name}": f"buffer.explorer_input.{name}"
    for name in ("default_workflow_type", "default_eval_workflow_type", "default_reward_fn_type")
}
"""Key -> where it stands today."""

ENGINES = {"external": "openai"}

REMOVED = {
    "trainer.trainer_config_path": (
        "A separate trainer file is no longer read.",
        "Move its content into `trainer.trainer_config`.",
    ),
    "explorer.runner_num": (
        "The number of runners follows from the engines.",
        "Set `explorer.runner_per_model`; there are that many for each engine.",
    ),
}
"""Key -> why it is gone and what to do instead."""

COMPUTED = frozenset(
    (
        "cluster.total_gpu_num",
        "cluster.rollout_gpu_num",
        "cluster.auxiliary_model_gpu_num",
        "cluster.explorer_gpu_num",
        "cluster.trainer_gpu_num",
        "cluster.trainer_node_num",
        "cluster.trainer_gpu_num_per_node",
        "buffer.tokenizer_path",
        "buffer.cache_dir",
        "synchronizer.explorer_world_size",
        "synchronizer.ray_namespace",
    )
)
"""Keys of earlier releases that only the program itself filled in."""

_COMPUTED_IN_MODEL = frozenset(
    (
        "gpu_per_engine",
        "node_rank",
        "bundle_indices",
        "engine_id",
        "ray_namespace",
        "ray_actor_name",
        "sync_method",
        "checkpoint_job_dir",
        "cuda_visible_devices",
    )
)
_COMPUTED_IN_DATA = frozenset(
    (
        "index",
        "is_eval",
        "batch_size",
        "total_steps",
        "ray_namespace",
        "tokenizer_path",
        "wrap_in_ray",
    )
)


@dataclass
class Renamed:
    """A tree in today's spelling, and what to tell about it."""

    data: dict[str, Any]
    moved: dict[str, str] = field(default_factory=dict)
    """Today's dotted key -> the one in the file."""
    warnings: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def modernise(data: dict[str, Any]) -> Renamed:
    """``data`` with every old spelling replaced, in stages too. ``data`` itself is changed."""
    result = Renamed(data)
    for prefix, tree in _trees(data):
        _drop_empty(tree)
        _rename_values(prefix, tree, result)
        _rename_keys(prefix, tree, result)
        _rename_engines(prefix, tree, result)
        _move_keys(prefix, tree, result)
        _move_explorer_output(prefix, tree, result)
    return result


def is_computed(key: str) -> bool:
    """Whether ``key`` is one that earlier releases filled in by themselves."""
    parent, _, last = key.rpartition(".")
    if key in COMPUTED:
        return True
    if ".rollout_model" in f".{parent}" or ".auxiliary_models." in f".{parent}.":
        return last in _COMPUTED_IN_MODEL
    is_data = any(word in parent for word in ("taskset", "experience_buffer", "auxiliary_buffers"))
    return is_data and last in _COMPUTED_IN_DATA


def _trees(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "", data
    stages = data.get("stages")
    for index, stage in enumerate(stages if isinstance(stages, list) else []):
        if isinstance(stage, dict):
            yield f"stages.{index}.", stage


def _drop_empty(tree: dict[str, Any]) -> None:
    """Leave out removed keys at the value that earlier releases wrote where nothing was set."""
    for pattern in REMOVED:
        for holder, key, _ in _find(tree, pattern):
            if holder[key] in (None, ""):
                del holder[key]


def _rename_values(prefix: str, tree: dict[str, Any], result: Renamed) -> None:
    for pattern, names in VALUES.items():
        for holder, key, dotted in _find(tree, pattern):
            old = holder[key]
            new = names.get(old.strip().lower()) if isinstance(old, str) else None
            if new is not None:
                holder[key] = new
                result.warnings.append(f"{prefix}{dotted}: {old!r} is now called {new!r}.")


def _rename_keys(prefix: str, tree: dict[str, Any], result: Renamed) -> None:
    for pattern, new in KEYS.items():
        for holder, old, dotted in _find(tree, pattern):
            value = holder.pop(old)
            new_key = f"{prefix}{dotted.rpartition('.')[0]}.{new}"
            if holder.get(new) not in (None, value) and value is not None:
                message = f"`{old}` is the old name of `{new}`, and both are given: {holder[new]}."
                result.problems.append(
                    Problem(f"{prefix}{dotted}", message, f"Remove `{old}`.", value)
                )
                continue
            if value is not None:
                holder[new] = value
                result.moved[new_key] = f"{prefix}{dotted}"
            result.warnings.append(f"{prefix}{dotted} is now called {new_key}.")


def _move_keys(prefix: str, tree: dict[str, Any], result: Renamed) -> None:
    for old, new in MOVED.items():
        *sections, last = new.split(".")
        for holder, key, _ in _find(tree, old):
            target: Any = tree
            for section in sections:
                target = target.setdefault(section, {}) if isinstance(target, dict) else None
            if not isinstance(target, dict) or target.get(last) not in (None, holder[key]):
                message = f"This is the old place of {prefix}{new}, and both are given."
                result.problems.append(Problem(f"{prefix}{old}", message, f"Remove `{old}`."))
                holder.pop(key)
                continue
            target[last] = holder.pop(key)
            result.moved[f"{prefix}{new}"] = f"{prefix}{old}"
            result.warnings.append(f"{prefix}{old} is now called {prefix}{new}.")


def _rename_engines(prefix: str, tree: dict[str, Any], result: Renamed) -> None:
    for model in ("explorer.rollout_model", "explorer.auxiliary_models.*"):
        for holder, key, dotted in _find(tree, f"{model}.engine_type"):
            old = holder[key]
            word = old.strip().lower() if isinstance(old, str) else ""
            new = "vllm" if word.startswith("vllm") else ENGINES.get(word)
            if new is not None and word != new:
                holder[key] = new
                result.warnings.append(f"{prefix}{dotted}: {old!r} is now called {new!r}.")


def _move_explorer_output(prefix: str, tree: dict[str, Any], result: Renamed) -> None:
    buffer = tree.get("buffer")
    if not isinstance(buffer, dict) or "explorer_output" not in buffer:
        return
    output = buffer.pop("explorer_output")
    key = f"{prefix}buffer.explorer_output"
    if output is None:
        return
    target = buffer.get("trainer_input")
    trainer_input = target if isinstance(target, dict) else buffer.setdefault("trainer_input", {})
    new_key = f"{prefix}buffer.trainer_input.experience_buffer"
    if isinstance(trainer_input, dict) and not trainer_input.get("experience_buffer"):
        trainer_input["experience_buffer"] = output
        result.moved[new_key] = key
        result.warnings.append(f"{key} is now called {new_key}.")
    elif output != trainer_input.get("experience_buffer"):
        message = f"This is the old name of {new_key}, and both are given."
        result.problems.append(Problem(key, message, "Remove `explorer_output`."))


def _find(
    tree: dict[str, Any], pattern: str, prefix: str = ""
) -> list[tuple[dict[str, Any], str, str]]:
    """(the dict that holds it, its key, its dotted key) of each match; ``*`` is a list index."""
    head, _, rest = pattern.partition(".")
    if not rest:
        return [(tree, head, f"{prefix}{head}")] if head in tree else []
    child = tree.get(head)
    if rest.startswith("*."):
        items = enumerate(child) if isinstance(child, list) else ()
        return [
            match
            for index, item in items
            if isinstance(item, dict)
            for match in _find(item, rest[2:], f"{prefix}{head}.{index}.")
        ]
    return _find(child, rest, f"{prefix}{head}.") if isinstance(child, dict) else []
