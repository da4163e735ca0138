"""Checks of a run on the Tinker service: what it has no setting for is refused, not ignored."""

from __future__ import annotations

from collections.abc import Iterator

from trinity.common.config.case import Case, Check
from trinity.common.config.derive import needs_critic
from trinity.common.config.fill import value_at
from trinity.common.constants import EngineType, Mode, TrainerType
from trinity.common.errors import Problem

_ROLLOUT = "explorer.rollout_model"
_TRAINER = (
    "trainer_strategy",
    "num_processes",
    "dtype",
    "save_strategy",
    "use_dynamic_bsz",
    "max_token_len_per_gpu",
    "use_remove_padding",
    "use_torch_compile",
    "enable_shared_prefix",
    "balance_batch",
    "ulysses_sequence_parallel_size",
    "enable_gradient_checkpointing",
    "param_offload",
    "optimizer_offload",
    "offload_policy",
)
_ENGINE = (
    "tensor_parallel_size",
    "data_parallel_size",
    "pipeline_parallel_size",
    "enable_expert_parallel",
    "extra_engine_args",
    "enforce_eager",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "gpu_memory_utilization",
    "enable_log_requests",
    "dtype",
)
_SAMPLING = ("min_response_tokens", "repetition_penalty", "rope_scaling", "rope_theta")


def _enabled(case: Case) -> Iterator[Problem]:
    enable = "Set `model.tinker.enable: true`."
    given, tinker = case.given, case.config.model.tinker.enable
    engine = given.explorer.rollout_model.engine_type
    if not tinker and case.config.trainer.trainer_type is TrainerType.TINKER:
        message = "The trainer is `tinker`, but `model.tinker.enable` is false."
        yield case.problem("trainer.trainer_type", message, enable)
    if not tinker and case.config.mode.explores and engine is EngineType.TINKER:
        message = "The engine is `tinker`, but `model.tinker.enable` is false."
        yield case.problem(f"{_ROLLOUT}.engine_type", message, enable)
    is_other = case.is_set(f"{_ROLLOUT}.engine_type") and engine is not EngineType.TINKER
    if tinker and case.config.mode.explores and is_other:
        message = f"`model.tinker.enable` is true, but this says {engine.value!r}."
        yield Problem(f"{_ROLLOUT}.engine_type", message, "Remove one of the two.", engine)
    trainer = given.trainer.trainer_type
    if tinker and case.is_set("trainer.trainer_type") and trainer is not TrainerType.TINKER:
        message = f"`model.tinker.enable` is true, but this says {trainer.value!r}."
        yield Problem("trainer.trainer_type", message, "Remove one of the two.", trainer)


def _adapter(case: Case) -> Iterator[Problem]:
    if case.config.model.lora_configs and case.config.model.tinker.enable:
        message = "The Tinker service makes its own adapter (`model.tinker.enable`)."
        fix = "Remove `lora_configs`, and set `model.tinker.rank`."
        yield Problem("model.lora_configs", message, fix)


def _losses(case: Case) -> Iterator[Problem]:
    """What is learned from has to be a function of logprobs."""
    if case.config.trainer.trainer_type is not TrainerType.TINKER or not case.config.mode.trains:
        return
    if needs_critic(case.config):
        message = "The Tinker service trains no critic."
        fix = "Use an algorithm without one, such as `grpo`."
        yield case.problem("algorithm.algorithm_type", message, fix)
    if case.given.algorithm.entropy_loss_fn not in (None, "none"):
        message = "The Tinker service gives logprobs of tokens, no entropies."
        yield case.problem("algorithm.entropy_loss_fn", message, "Remove it, or set it to `none`.")


def _temperatures(case: Case) -> Iterator[Problem]:
    """Samples have to be of the distribution whose logprobs the service trains on."""
    mode = case.config.mode
    if not case.config.model.tinker.enable or not (mode.trains or mode is Mode.EXPLORE):
        return
    tasks = case.config.buffer.explorer_input
    places = [f"buffer.explorer_input.tasksets.{index}" for index in range(len(tasks.tasksets))]
    keys = ["model", _ROLLOUT, *(f"{place}.rollout_args" for place in places)]
    for key in [f"{key}.temperature" for key in keys]:
        heat = value_at(case.config, key.split("."))
        if heat not in (None, 1):
            message = "The Tinker service trains on logprobs at temperature 1."
            yield Problem(_written(case, key), message, "Set it to 1, or remove it.", heat)
            return


def _written(case: Case, key: str) -> str:
    """Where a value was written that may stand at several places."""
    single = key.replace("tasksets.0", "taskset")
    return single if case.is_set(single) else key


def _places(case: Case) -> Iterator[Problem]:
    """Settings of machines and models that the service decides on."""
    if not case.config.model.tinker.enable:
        return
    for name in _TRAINER if case.config.mode.trains else ():
        yield from _decided_there(case, f"trainer.{name}")
    if case.config.mode.explores:
        keys = [f"{_ROLLOUT}.{name}" for name in _ENGINE]
        keys += [f"{place}.{name}" for name in _SAMPLING for place in ("model", _ROLLOUT)]
        for key in keys:
            yield from _decided_there(case, key)
        if case.is_changed(f"{_ROLLOUT}.update_mode"):
            message = "Samples under way at the Tinker service end on the weights they began with."
            yield case.problem(f"{_ROLLOUT}.update_mode", message, "Remove it, or set `pause`.")
    if case.config.mode is Mode.COLOCATE:
        message = "On the Tinker service trainer and engine share no GPUs of yours."
        yield case.problem("mode", message, "Set `mode: both`.")


def _decided_there(case: Case, key: str) -> Iterator[Problem]:
    if case.is_changed(key):
        yield case.problem(key, "The Tinker service has no such setting.", "Remove it.")


TINKER_CHECKS: tuple[Check, ...] = (_enabled, _adapter, _losses, _temperatures, _places)
