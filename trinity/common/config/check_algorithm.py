"""Checks of `algorithm:` against the mode, the data and itself."""

from __future__ import annotations

from collections.abc import Iterator

from trinity.common.config.algorithm import LOSS_AGG_MODES
from trinity.common.config.algorithm_table import GROUP_ADVANTAGES
from trinity.common.config.arithmetic import EXPERT_DATA_RATIO
from trinity.common.config.case import Case, Check
from trinity.common.constants import EngineType, Mode, TrainerType
from trinity.common.errors import Problem

_REPLAY = "algorithm.enable_router_replay"
_TELL_ROUTES = (EngineType.TORCH, EngineType.VLLM)

METHOD_REGISTRIES = {
    "advantage_fn": "ADVANTAGE_FN",
    "policy_loss_fn": "POLICY_LOSS_FN",
    "kl_loss_fn": "KL_FN",
    "kl_penalty_fn": "KL_FN",
    "entropy_loss_fn": "ENTROPY_LOSS_FN",
    "sample_strategy": "SAMPLE_STRATEGY",
}
"""Key below ``algorithm`` -> what of `trinity.algorithm` it names one of."""

_NEEDS_TEACHER = frozenset(("on_policy_distill", "jsd"))


def _names(case: Case) -> Iterator[Problem]:
    yield from case.unknown("algorithm.algorithm_type", "ALGORITHM_TYPE", also=("none",))
    for field, registry in METHOD_REGISTRIES.items():
        if case.is_set(f"algorithm.{field}"):
            yield from case.unknown(f"algorithm.{field}", registry, also=("none",))


def _mode(case: Case) -> Iterator[Problem]:
    mode, name = case.config.mode, case.config.algorithm.algorithm_type
    if mode is Mode.BENCH or (Mode.BOTH if mode is Mode.SERVE else mode) in case.spec.modes:
        return
    wanted = " or ".join(sorted(case.spec.modes))
    message = f"{name} trains on a data set and takes no rollouts, but mode is {mode}."
    yield case.problem("algorithm.algorithm_type", message, f"Set `mode: {wanted}`.")


def _repeat_times(case: Case) -> Iterator[Problem]:
    algorithm, spec = case.config.algorithm, case.spec
    if not case.is_set("algorithm.repeat_times") or algorithm.repeat_times is None:
        return
    name, count, key = algorithm.algorithm_type, algorithm.repeat_times, "algorithm.repeat_times"
    if spec.fixed_repeat_times and count != spec.repeat_times:
        fix = f"Remove it, or set `repeat_times: {spec.repeat_times}`."
        yield case.problem(key, f"{name} takes rows in pairs; this is always 2.", fix)
    elif count < spec.min_repeat_times and algorithm.advantage_fn == spec.advantage_fn:
        message = f"{name} compares the samples of one task with each other, and there is one."
        fix = f"Set `repeat_times` to {spec.min_repeat_times} or more, such as 8."
        yield case.problem(key, message, fix)


def _taskset_repeat_times(case: Case) -> Iterator[Problem]:
    """Tasks of one set may have another number of samples, but not one where several are needed."""
    algorithm, spec = case.config.algorithm, case.spec
    if not case.feeds_a_trainer or algorithm.advantage_fn != spec.advantage_fn:
        return
    tasks = case.given.buffer.explorer_input
    single = [] if tasks.taskset is None else [("taskset", tasks.taskset)]
    many = [(f"tasksets.{index}", taskset) for index, taskset in enumerate(tasks.tasksets)]
    for place, taskset in [*single, *many]:
        count = taskset.repeat_times
        if count is not None and count < spec.min_repeat_times:
            key = f"buffer.explorer_input.{place}.repeat_times"
            message = f"{algorithm.algorithm_type} compares the samples of one task; here is one."
            fix = f"Remove it, or set it to {spec.min_repeat_times} or more."
            yield Problem(key, message, fix, count)


def _loss_agg_mode(case: Case) -> Iterator[Problem]:
    algorithm = case.config.algorithm
    own = (algorithm.policy_loss_fn_args or {}).get("loss_agg_mode")
    if own and own not in LOSS_AGG_MODES:
        key = "algorithm.policy_loss_fn_args.loss_agg_mode"
        message = "This is no way to make one number of the losses of tokens."
        yield Problem(key, message, f"Use one of {', '.join(LOSS_AGG_MODES)}.", own)
    elif own and own != algorithm.loss_agg_mode:
        message = f"algorithm.policy_loss_fn_args.loss_agg_mode says {own!r}."
        yield case.problem("algorithm.loss_agg_mode", message, "Remove one of the two.")


def _kl_penalty(case: Case) -> Iterator[Problem]:
    """It changes the reward in the trainer, where advantages of groups are there already."""
    algorithm = case.config.algorithm
    advantage = algorithm.advantage_fn or "none"
    is_penalised = algorithm.kl_penalty_fn not in (None, "none") and case.config.mode.trains
    if not is_penalised or advantage not in ("none", *GROUP_ADVANTAGES):
        return
    twin = GROUP_ADVANTAGES.get(advantage)
    if advantage == "none":
        message = f"{algorithm.algorithm_type} takes no advantage, so the reward changes nothing."
    else:
        message = f"The advantage {advantage} is taken of rewards before the trainer knows the KL."
    instead = f"set `advantage_fn: {twin}`, or " if twin else ""
    fix = f"{instead}set `kl_penalty_fn: none` and, for a KL in the loss, `kl_loss_fn`."
    yield case.problem("algorithm.kl_penalty_fn", message, fix[0].upper() + fix[1:])


def _warmup(case: Case) -> Iterator[Problem]:
    optimizer = case.config.algorithm.optimizer
    if optimizer.lr_warmup_steps >= 0 and optimizer.lr_warmup_steps_ratio > 0:
        key = "algorithm.optimizer.lr_warmup_steps_ratio"
        message = f"algorithm.optimizer.lr_warmup_steps is {optimizer.lr_warmup_steps} already."
        yield case.problem(key, message, "Remove one of the two.")
    for index, beta in enumerate(optimizer.betas):
        if not 0 <= beta < 1:
            key = f"algorithm.optimizer.betas.{index}"
            message = "A decay rate lies from 0 to below 1."
            yield case.problem(key, message, "Use `betas: [0.9, 0.999]`.")


def _grad_clip(case: Case) -> Iterator[Problem]:
    ours, other = "trainer.grad_clip", "algorithm.optimizer.clip_grad"
    if not (case.is_set(ours) and case.is_set(other)):
        return
    if case.given.trainer.grad_clip != case.given.algorithm.optimizer.clip_grad:
        message = f"`{ours}` means the same and says {case.given.trainer.grad_clip}."
        yield case.problem(other, message, "Remove one of the two.")


def _expert_data(case: Case) -> Iterator[Problem]:
    algorithm = case.config.algorithm
    if algorithm.sample_strategy != "mix" or not case.config.mode.trains:
        return
    args = algorithm.sample_strategy_args or {}
    share = args.get("expert_data_ratio", EXPERT_DATA_RATIO)
    if isinstance(share, int | float) and not 0 <= share <= 1:
        key = "algorithm.sample_strategy_args.expert_data_ratio"
        yield Problem(key, "A share lies from 0 to 1.", "Write a number, such as `0.5`.", share)
    name = str(args.get("sft_dataset_name", "sft_dataset"))
    if name not in case.config.buffer.trainer_input.auxiliary_buffers:
        message = f"{algorithm.algorithm_type} mixes in expert data, and there is none."
        fix = f"Add `{name}` with its `path` below `buffer.trainer_input.auxiliary_buffers`."
        key = f"buffer.trainer_input.auxiliary_buffers.{name}"
        yield Problem(key, message, fix, line=_line(case))


def _teacher(case: Case) -> Iterator[Problem]:
    name = case.config.algorithm.algorithm_type
    learns = name in _NEEDS_TEACHER and case.config.mode.pairs
    if learns and not case.config.explorer.auxiliary_models:
        message = f"{name} learns from a teacher, and there is none."
        fix = "Add the teacher as `- model_path: ...` below `explorer.auxiliary_models`."
        yield Problem("explorer.auxiliary_models", message, fix, line=_line(case))


def _line(case: Case) -> int | None:
    return case.given.source.line("algorithm.algorithm_type")


def _router_replay(case: Case) -> Iterator[Problem]:
    """Routes must be told by the engine, and taken by the trainer."""
    config, model = case.config, case.config.explorer.rollout_model
    if config.algorithm.enable_router_replay and config.mode.trains:
        yield from _trainer_without_routes(case)
    if not model.enable_return_routed_experts or config.mode is Mode.TRAIN:
        return
    asked = config.algorithm.enable_router_replay
    key = _REPLAY if asked else "explorer.rollout_model.enable_return_routed_experts"
    is_on_cpu = model.engine_type is EngineType.VLLM and not config.cluster.gpu_per_node
    if model.engine_type not in _TELL_ROUTES or is_on_cpu:
        where = " without GPUs" if is_on_cpu else ""
        why = f"Engines of type {model.engine_type}{where} don't tell the experts of tokens."
        fix = "Set `explorer.rollout_model.engine_type: torch`, or this to false."
        yield case.problem(key, why, fix)


def _trainer_without_routes(case: Case) -> Iterator[Problem]:
    trainer = case.config.trainer
    if trainer.trainer_type is not TrainerType.TORCH:
        why = f"A trainer of type {trainer.trainer_type} chooses experts by itself."
        yield case.problem(_REPLAY, why, "Set `trainer.trainer_type: torch`, or remove it.")
    elif trainer.use_torch_compile:
        why = "Layers in which experts are prescribed are not compiled."
        fix = "Remove it, or `algorithm.enable_router_replay`."
        yield case.problem("trainer.use_torch_compile", why, fix)


ALGORITHM_CHECKS: tuple[Check, ...] = (
    _names,
    _mode,
    _repeat_times,
    _taskset_repeat_times,
    _loss_agg_mode,
    _kl_penalty,
    _warmup,
    _grad_clip,
    _expert_data,
    _teacher,
    _router_replay,
)
