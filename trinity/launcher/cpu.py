"""`--cpu`: the same file on a machine without GPUs. Says what it replaced by what."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trinity.common.config import Config, InferenceModelConfig, MegatronConfig, StageConfig
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
    changes: list[Replacement] = []

    def put(section: object, prefix: str, name: str, value: object) -> None:
        before = getattr(section, name)
        if before != value:
            setattr(section, name, value)
            changes.append(Replacement(f"{prefix}{name}", before, value))

    put(copy.cluster, "cluster.", "node_num", 1)
    put(copy.cluster, "cluster.", "gpu_per_node", 0)
    stages = [(f"stages.{index}.", stage) for index, stage in enumerate(copy.stages)]
    sections: list[tuple[str, Config | StageConfig]] = [("", copy), *stages]
    for prefix, section in sections:
        for key, model in _models(section, prefix):
            if model.engine_type is EngineType.VLLM:
                put(model, key, "engine_type", EngineType.TORCH)
                put(model, key, "lora_kwargs", {})
            for size in _PARALLEL_SIZES:
                put(model, key, size, 1)
        if section.trainer is not None:
            key = f"{prefix}trainer."
            if section.trainer.trainer_type is TrainerType.VERL:
                put(section.trainer, key, "trainer_type", TrainerType.TORCH)
            put(section.trainer, key, "ulysses_sequence_parallel_size", 1)
            if section.trainer.trainer_strategy is TrainerStrategy.MEGATRON:
                put(section.trainer, key, "trainer_strategy", TrainerStrategy.FSDP2)
                put(section.trainer, key, "grad_offload", False)
                for name, default in MegatronConfig():
                    put(section.trainer.megatron, f"{key}megatron.", name, default)
        if section.mode is Mode.COLOCATE:
            put(section, prefix, "mode", Mode.BOTH)
    if not has_bfloat16():
        _use_float32(copy, put)
    if copy.synchronizer.sync_method is SyncMethod.NCCL:
        put(copy.synchronizer, "synchronizer.", "sync_method", SyncMethod.MEMORY)
    return copy, changes


def _use_float32(config: Config, put: Callable[[object, str, str, object], None]) -> None:
    """Without instructions for it, bfloat16 takes several times as long, and as much memory.

    Where the user names a number format, that one stays.
    """
    rollout, trainer = config.explorer.rollout_model, config.trainer
    named = trainer.model_fields_set | rollout.model_fields_set
    if rollout.engine_type is not EngineType.TORCH or "dtype" in named:
        return
    put(trainer, "trainer.", "dtype", "float32")
    for key, model in _models(config, ""):
        if model.engine_type is EngineType.TORCH and "dtype" not in model.model_fields_set:
            put(model, key, "dtype", "float32")


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
