"""Checks of `synchronizer:` and of what depends on its style."""

from __future__ import annotations

from collections.abc import Iterator

from trinity.common.config.case import Case, Check
from trinity.common.constants import EngineType, Mode, SyncMethod, SyncStyle, TrainerType
from trinity.common.errors import Problem

_METHOD = "synchronizer.sync_method"


def _method(case: Case) -> Iterator[Problem]:
    method, mode = case.given.synchronizer.sync_method, case.config.mode
    if method is None or method is SyncMethod.CHECKPOINT:
        return
    if not mode.pairs:
        message = f"mode is {mode}, and `{method}` needs the explorer and the trainer in one run."
        fix = "Remove `sync_method`, or set `mode: both`."
        yield case.problem(_METHOD, message, fix)
    elif method is SyncMethod.NCCL:
        yield from _nccl(case)


def _nccl(case: Case) -> Iterator[Problem]:
    config = case.config
    engine = config.explorer.rollout_model.engine_type
    if config.mode is Mode.COLOCATE:
        message = "Trainer and engine share GPUs (mode `colocate`); NCCL joins different ones."
        yield case.problem(_METHOD, message, "Remove `sync_method`.")
    elif config.trainer.trainer_type is TrainerType.TINKER or engine is EngineType.OPENAI:
        message = "The weights are at an outside service; no GPU of this cluster has them."
        yield case.problem(_METHOD, message, "Remove `sync_method`.")
    elif config.model.lora_configs:
        message = "Adapters (`model.lora_configs`) travel as files or through memory."
        fix = "Set `sync_method: checkpoint` or `memory`."
        yield case.problem(_METHOD, message, fix)


def _intervals(case: Case) -> Iterator[Problem]:
    sync = case.config.synchronizer
    both = (sync.explorer_sync_interval, sync.trainer_sync_interval)
    if sync.sync_style is SyncStyle.FIXED and both[0] != both[1]:
        message = (
            f"With `sync_style: fixed` both sides sync together, but the explorer does every "
            f"{both[0]} steps and the trainer every {both[1]}."
        )
        key = "synchronizer.trainer_sync_interval"
        if not case.is_set(key):
            key = "synchronizer.explorer_sync_interval"
        yield case.problem(key, message, "Set `sync_interval` alone, or another `sync_style`.")


def _over_rollout(case: Case) -> Iterator[Problem]:
    fixed = case.config.synchronizer.sync_style is SyncStyle.FIXED
    if case.config.explorer.over_rollout.ratio > 0 and fixed:
        message = "`synchronizer.sync_style: fixed` waits for every task."
        fix = "Set `sync_style: explorer_driven`, or `ratio: 0`."
        yield case.problem("explorer.over_rollout.ratio", message, fix)


def _fully_async(case: Case) -> Iterator[Problem]:
    style = case.config.synchronizer.sync_style
    key = "synchronizer.sync_style"
    if style is SyncStyle.FULLY_ASYNC:
        if case.config.buffer.explorer_input.eval_tasksets and case.config.mode.pairs:
            message = "Weights change within a step, so an evaluation would belong to no version."
            fix = "Remove `eval_tasksets`, and evaluate the checkpoints with `mode: bench`."
            yield case.problem(key, message, fix)
    elif case.is_changed("explorer.max_inflight_batches"):
        message = f"Only `sync_style: fully_async` has several batches under way; this is {style}."
        yield case.problem("explorer.max_inflight_batches", message, "Remove it.")


def _number_format(case: Case) -> Iterator[Problem]:
    """Weights go to the engines as the trainer computes with them."""
    config = case.config
    model, own = config.explorer.rollout_model, config.trainer.dtype
    is_ours = model.engine_type in (EngineType.TORCH, EngineType.VLLM)
    is_there = is_ours and config.trainer.trainer_type is not TrainerType.TINKER
    if not (config.mode.pairs and is_there) or model.dtype in ("auto", own):
        return
    message = f"The engines take the trainer's weights as they are, and `trainer.dtype` is {own}."
    other = "" if model.dtype == "float16" else f", or `trainer.dtype: {model.dtype}`"
    fix = f"Set `dtype: {own}`{other}."
    yield case.problem("explorer.rollout_model.dtype", message, fix)


SYNC_CHECKS: tuple[Check, ...] = (
    _method,
    _intervals,
    _over_rollout,
    _fully_async,
    _number_format,
)
