"""`--cpu`: the same file on a machine without GPUs. Says what it replaced by what."""

from collections.abc import Iterator
from dataclasses import dataclass

from trinity.common.config import (
    Config,
    InferenceModelConfig,
    MegatronConfig,
    StageConfig,
    TrainerConfig,
)
from trinity.common.constants import EngineType, Mode, SyncMethod, TrainerStrategy, TrainerType
from trinity.utils.processor import has_bfloat16

_PARALLEL_SIZES = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")


@dataclass(frozen=True)
class Replacement:
    """One key that ``--cpu`` changed."""

    key: str
    before: object
    after: object


def for_cpu(config: Config) -> tuple[Config, list[Replacement]]:
    """A copy of ``config`` that runs without GPUs, and what was changed.

    Cluster, engines, trainer backend and sync method are replaced; whatever describes the
    algorithm, the data and the model stays.
    """
    copy = config.model_copy(deep=True)
    changes = _Changes()
    changes.put(copy.cluster, "cluster.", "node_num", 1)
    changes.put(copy.cluster, "cluster.", "gpu_per_node", 0)
    stages = [(f"stages.{index}.", stage) for index, stage in enumerate(copy.stages)]
    sections: list[tuple[str, Config | StageConfig]] = [("", copy), *stages]
    for prefix, section in sections:
        for key, model in _models(section, prefix):
            _change_model(model, key, changes)
        if section.trainer is not None:
            _change_trainer(section.trainer, f"{prefix}trainer.", changes)
        if section.mode is Mode.COLOCATE:
            changes.put(section, prefix, "mode", Mode.BOTH)
    if not has_bfloat16():
        _use_float32(copy, changes)
    if copy.synchronizer.sync_method is SyncMethod.NCCL:
        changes.put(copy.synchronizer, "synchronizer.", "sync_method", SyncMethod.MEMORY)
    return copy, changes.made


class _Changes:
    """Changes a configuration, and keeps what it was before."""

    def __init__(self) -> None:
        self.made: list[Replacement] = []

    def put(self, section: object, prefix: str, name: str, value: object) -> None:
        before = getattr(section, name)
        if before != value:
            setattr(section, name, value)
            self.made.append(Replacement(f"{prefix}{name}", before, value))


def _change_model(model: InferenceModelConfig, key: str, changes: _Changes) -> None:
    if model.engine_type is EngineType.VLLM:
        changes.put(model, key, "engine_type", EngineType.TORCH)
        changes.put(model, key, "lora_kwargs", {})
    for size in _PARALLEL_SIZES:
        changes.put(model, key, size, 1)


def _change_trainer(trainer: TrainerConfig, key: str, changes: _Changes) -> None:
    if trainer.trainer_type is TrainerType.VERL:
        changes.put(trainer, key, "trainer_type", TrainerType.TORCH)
    changes.put(trainer, key, "ulysses_sequence_parallel_size", 1)
    if trainer.trainer_strategy is TrainerStrategy.MEGATRON:
        changes.put(trainer, key, "trainer_strategy", TrainerStrategy.FSDP2)
        changes.put(trainer, key, "grad_offload", False)
        for name, default in MegatronConfig():
            changes.put(trainer.megatron, f"{key}megatron.", name, default)


def _use_float32(config: Config, changes: _Changes) -> None:
    """Without instructions for it, bfloat16 takes several times as long, and as much memory.

    Where the user names a number format, that one stays.
    """
    rollout, trainer = config.explorer.rollout_model, config.trainer
    named = trainer.model_fields_set | rollout.model_fields_set
    if rollout.engine_type is not EngineType.TORCH or "dtype" in named:
        return
    changes.put(trainer, "trainer.", "dtype", "float32")
    for key, model in _models(config, ""):
        if model.engine_type is EngineType.TORCH and "dtype" not in model.model_fields_set:
            changes.put(model, key, "dtype", "float32")


def _models(
    section: Config | StageConfig, prefix: str
) -> Iterator[tuple[str, InferenceModelConfig]]:
    """The models of a file or of a stage, each with its key."""
    explorer = section.explorer
    if explorer is None:
        return
    yield f"{prefix}explorer.rollout_model.", explorer.rollout_model
    for index, model in enumerate(explorer.auxiliary_models):
        yield f"{prefix}explorer.auxiliary_models[{index}].", model
