"""Facts that must hold between the GPUs of a plan and how trainer and engines share them."""

from collections.abc import Iterator

from trinity.common.config import Config, SynchronizerConfig
from trinity.common.constants import EngineType, Mode, SyncMethod, SyncStyle, TrainerType
from trinity.common.errors import Problem
from trinity.launcher.gpu_needs import engine_gpus
from trinity.launcher.plan import RunPlan

_METHOD = "synchronizer.sync_method"
_ROLLOUT = "explorer.rollout_model"


def gpu_problems(plan: RunPlan) -> Iterator[Problem]:
    """All that keeps weights from going from GPU to GPU, or parts from sharing one."""
    sync = plan.config.synchronizer
    if sync.delta and not (plan.config.mode.pairs and sync.sync_method is SyncMethod.NCCL):
        message = "Only NCCL sends changes alone; this run's weights go another way."
        yield Problem(
            "synchronizer.delta", message, "Remove it, or use `sync_method: nccl`.", "true"
        )
    if plan.config.mode is Mode.COLOCATE:
        yield from _colocation_problems(plan)
    elif plan.config.mode.pairs and sync.sync_method is SyncMethod.NCCL:
        yield from _nccl_problems(plan)


def _nccl_problems(plan: RunPlan) -> Iterator[Problem]:
    rollout = plan.config.explorer.rollout_model
    memory = "Set `synchronizer.sync_method: memory` (or `checkpoint`)."
    if not plan.gpus.total:
        message = "NCCL goes from GPU to GPU, and this run has none."
        yield Problem(_METHOD, message, memory, "nccl")
    elif rollout.engine_type is not EngineType.VLLM:
        message = f"The {rollout.engine_type} engine takes no weights by NCCL; vLLM does."
        yield Problem(_METHOD, message, memory, "nccl")
    elif rollout.data_parallel_size > 1:
        message = "Weights don't go by NCCL to the copies within an engine."
        fix = "Set `engine_num` to the number of copies, and `data_parallel_size: 1`."
        yield Problem(f"{_ROLLOUT}.data_parallel_size", message, fix, rollout.data_parallel_size)


def _colocation_problems(plan: RunPlan) -> Iterator[Problem]:
    if not plan.gpus.total:
        message = "Trainer and engine would share a GPU, and this run has none."
        yield Problem("mode", message, "Set `mode: both`, or run with --cpu.", "colocate")
        return
    yield from _unfit_to_share(plan.config)
    yield from _unequal_shares(plan)
    yield from _out_of_turn(plan.config.synchronizer)


def _unfit_to_share(config: Config) -> Iterator[Problem]:
    """Engines and trainers that give no memory back to each other."""
    rollout, kind = config.explorer.rollout_model, config.trainer.trainer_type
    if rollout.engine_type is not EngineType.VLLM:
        message = f"The {rollout.engine_type} engine can't free its memory for the trainer."
        yield Problem(f"{_ROLLOUT}.engine_type", message, "Use vllm.", str(rollout.engine_type))
    if kind is not TrainerType.TORCH:
        message = f"The trainer {kind} does not share the engine's GPU."
        yield Problem("trainer.trainer_type", message, "Use torch.")


def _unequal_shares(plan: RunPlan) -> Iterator[Problem]:
    """Engines on other GPUs than the trainer's."""
    cluster, explorer = plan.config.cluster, plan.config.explorer
    rollout, size = explorer.rollout_model, engine_gpus(explorer.rollout_model)
    shared = cluster.node_num * cluster.gpu_per_node or plan.gpus.explorer
    if cluster.node_num > 1:
        message = "Trainer and engines share the GPUs of one machine at most in this version."
        yield Problem("cluster.node_num", message, "Use one node, or `mode: both`.")
    elif plan.gpus.explorer != shared:
        message = f"Trainer and engines share {shared} GPUs; the engines take {plan.gpus.explorer}."
        fix = f"Set `engine_num: {max(1, shared // size)}`, for engines of {size} GPUs each."
        yield Problem(f"{_ROLLOUT}.engine_num", message, fix, rollout.engine_num)
    if rollout.data_parallel_size > 1:
        message = "Copies within an engine don't share the trainer's GPUs."
        yield Problem(f"{_ROLLOUT}.data_parallel_size", message, "Raise `engine_num` instead.")
    if any(map(engine_gpus, explorer.auxiliary_models)):
        message = "An auxiliary model needs a GPU of its own, and the only one is shared."
        yield Problem("explorer.auxiliary_models", message, "Use `mode: both`.")


def _out_of_turn(sync: SynchronizerConfig) -> Iterator[Problem]:
    if sync.sync_style is not SyncStyle.FIXED or sync.sync_offset:
        message = "Trainer and engine take turns on their GPU, so neither may run ahead."
        fix = "Set `sync_style: fixed` and `sync_offset: 0`."
        yield Problem("synchronizer.sync_style", message, fix, str(sync.sync_style))
    if sync.sync_method is not SyncMethod.MEMORY:
        message = "On a shared GPU weights go through its memory."
        yield Problem(_METHOD, message, "Remove `sync_method`.", str(sync.sync_method))
