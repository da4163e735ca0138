"""`--cpu`: the same file on a machine without GPUs. Says what it replaced by what."""

from dataclasses import dataclass

from trinity.common.config import Config
from trinity.common.constants import EngineType, Mode, SyncMethod, TrainerType


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
    models = [("explorer.rollout_model.", copy.explorer.rollout_model)]
    models += [
        (f"explorer.auxiliary_models[{index}].", model)
        for index, model in enumerate(copy.explorer.auxiliary_models)
    ]
    for prefix, model in models:
        if model.engine_type in (EngineType.VLLM,):
            put(model, prefix, "engine_type", EngineType.TORCH)
        for size in ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"):
            put(model, prefix, size, 1)
    if copy.trainer.trainer_type is TrainerType.VERL:
        put(copy.trainer, "trainer.", "trainer_type", TrainerType.TORCH)
    put(copy.trainer, "trainer.", "ulysses_sequence_parallel_size", 1)
    if copy.mode is Mode.COLOCATE:
        put(copy, "", "mode", Mode.BOTH)
    if copy.synchronizer.sync_method is SyncMethod.NCCL:
        put(copy.synchronizer, "synchronizer.", "sync_method", SyncMethod.MEMORY)
    return copy, changes
