"""What `trinity explain` says about one stage, as rows of text. Draws nothing.

Of its own are where the parts run and what memory they take; the rest is in `explained_*`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from trinity.cli.explained_checkpoints import checkpoint_counts, checkpoint_rows
from trinity.cli.explained_picture import picture
from trinity.cli.explained_steps import batch_rows, step_rows
from trinity.cli.explained_words import Row, is_at_service
from trinity.common.config import Config, GPUSplit, split_gpus
from trinity.common.config.advice import advice_of
from trinity.common.config.arithmetic import arithmetic_of
from trinity.common.config.case import Case
from trinity.common.config.gpus import gpus_per_engine
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.config.memory import engine_memory, shards_of, trainer_memory
from trinity.common.config.memory_parts import Part, micro_batch_tokens
from trinity.common.config.shape import ModelShape, find_shape
from trinity.common.config.training import training_settings
from trinity.common.constants import EngineType, Mode

_SERVICE = "Tinker service"


@dataclass
class Explanation:
    """The answer of `trinity explain` for one stage."""

    title: str
    picture: str
    step: list[Row] = field(default_factory=list)
    batch_sizes: list[Row] = field(default_factory=list)
    places: list[Row] = field(default_factory=list)
    memory: dict[str, list[Part]] = field(default_factory=dict)
    checkpoints: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def explain_stage(stage: Case, gpu_bytes: float) -> Explanation:
    """All about one stage. ``gpu_bytes`` is the memory of one GPU."""
    filled = stage.config
    cluster = filled.cluster
    nodes = max(cluster.node_num, 1) if cluster.gpu_per_node else 0
    split = split_gpus(filled, nodes, cluster.gpu_per_node)
    numbers = arithmetic_of(filled, split)
    title = f"{filled.project}/{filled.name}: {filled.algorithm.algorithm_type}, mode {filled.mode}"
    explanation = Explanation(title, picture(filled, numbers, split))
    explanation.step = step_rows(filled, numbers)
    if filled.mode.trains and not is_at_service(filled):
        explanation.batch_sizes = batch_rows(filled, numbers)
    explanation.places = _place_rows(filled, split)
    shape = find_shape(filled.model.model_path)
    if is_at_service(filled):
        explanation.notes.append("The model is at the Tinker service, and takes no memory here.")
        _add_engine_memory(explanation, filled, gpu_bytes)
        explanation.checkpoints = checkpoint_counts(filled)
    elif shape is None:
        explanation.notes.append(
            f"The size of {filled.model.model_path!r} is not known here, so no memory is estimated."
        )
    else:
        _add_memory(explanation, filled, split, shape, gpu_bytes)
        explanation.checkpoints = checkpoint_rows(filled, shape)
    explanation.notes += [*advice_of([stage]), *_notes(filled)]
    return explanation


def _place_rows(config: Config, split: GPUSplit) -> list[Row]:
    rows: list[Row] = []
    taken = 0
    for part, model in _engines(config):
        for engine in range(model.engine_num):
            size = gpus_per_engine(model) if split.total else 0
            name = f"{part}, engine {engine}"
            where = _gpu_range(split, taken, size)
            is_there = model.engine_type is EngineType.TINKER
            rows.append((name, _SERVICE if is_there else where, _engine_text(model)))
            taken += size
    if config.mode.trains:
        if config.mode is Mode.COLOCATE:
            taken = split.auxiliary
        kind = f"{config.trainer.trainer_type}, {config.trainer.trainer_strategy}"
        where = _gpu_range(split, taken, split.trainer)
        if is_at_service(config):
            kind, where = f"tinker, an adapter of rank {config.model.tinker.rank}", _SERVICE
        rows.append(("trainer", where, kind))
    return rows


def _gpu_range(split: GPUSplit, start: int, size: int) -> str:
    if split.total == 0:
        return "found at start"
    if size < 1:
        return "none"
    first, last = start, start + size - 1
    if split.nodes == 1:
        return f"{first}" if size == 1 else f"{first}-{last}"
    return f"{_gpu_name(split, first)} to {_gpu_name(split, last)}"


def _gpu_name(split: GPUSplit, index: int) -> str:
    return f"{index // split.per_node}.{index % split.per_node}"


def _engine_text(model: InferenceModelConfig) -> str:
    return f"{model.engine_type}: {model.model_path}"


def _add_memory(
    explanation: Explanation,
    config: Config,
    split: GPUSplit,
    shape: ModelShape,
    gpu_bytes: float,
) -> None:
    if shape.is_guess:
        explanation.notes.append(
            f"{config.model.model_path} is not on this machine; its shape is a usual one for "
            "the size in its name."
        )
    if config.mode.trains:
        parts = trainer_memory(config, shape, shards_of(split), gpu_bytes)
        title = "memory of a trainer GPU, estimated" if split.total else "memory of the trainer"
        explanation.memory[title] = parts
        _judge(explanation, "trainer", parts, gpu_bytes)
    _add_engine_memory(explanation, config, gpu_bytes)


def _add_engine_memory(explanation: Explanation, config: Config, gpu_bytes: float) -> None:
    for name, model in _engines(config):
        own = find_shape(model.model_path or "")
        if own is not None and model.engine_type in ("vllm", "torch"):
            parts = engine_memory(model, own, gpu_bytes, config.explorer.runner_per_model)
            explanation.memory[f"memory of {_one_engine(name, model, gpu_bytes)}"] = parts
            _judge(explanation, "rollout", parts, gpu_bytes)


def _engines(config: Config) -> list[tuple[str, InferenceModelConfig]]:
    if not config.mode.explores:
        return []
    models = [("rollout model", config.explorer.rollout_model)]
    for index, model in enumerate(config.explorer.auxiliary_models):
        models.append((f"auxiliary model {index}", model))
    return models


def _one_engine(name: str, model: InferenceModelConfig, gpu_bytes: float) -> str:
    if model.engine_type == "torch":
        return f"an engine of the {name}, at most"
    return f"a GPU of the {name} with {gpu_bytes / 2**30:.0f} GiB, estimated"


def _judge(explanation: Explanation, part: str, parts: list[Part], gpu_bytes: float) -> None:
    total = sum(item.bytes for item in parts)
    if total > gpu_bytes:
        explanation.notes.append(
            f"A {part} GPU would need {total / 2**30:.0f} GiB and has {gpu_bytes / 2**30:.0f}: "
            + _RELIEF[part]
        )


_RELIEF = {
    "trainer": "set trainer.enable_gradient_checkpointing, lower trainer.max_token_len_per_gpu, "
    "or set trainer.optimizer_offload.",
    "rollout": "raise explorer.rollout_model.tensor_parallel_size.",
}


def _notes(config: Config) -> Iterator[str]:
    longest = config.model.max_model_len or 0
    if config.mode.trains and longest and not is_at_service(config):
        held = micro_batch_tokens(config, training_settings(config).actor)
        yield f"One pass holds up to {held:,} tokens; the longest experience has {longest:,}."
