"""Checks of `trainer:`."""

from __future__ import annotations

from collections.abc import Iterator

from trinity.common.config.case import Case, Check
from trinity.common.config.derive import needs_critic
from trinity.common.constants import TrainerStrategy, TrainerType
from trinity.common.errors import Problem


def _loss_scale(case: Case) -> Iterator[Problem]:
    if not case.config.trainer.fix_actor_microbatch_loss_scale:
        message = "The loss never depends on how a batch is split into micro-batches."
        key = "trainer.fix_actor_microbatch_loss_scale"
        yield case.problem(key, message, "Remove it, or set it to true.")


def _megatron(case: Case) -> Iterator[Problem]:
    trainer = case.config.trainer
    if trainer.trainer_strategy is not TrainerStrategy.MEGATRON:
        if case.is_changed("trainer.megatron"):
            message = f"This is for Megatron, but trainer_strategy is {trainer.trainer_strategy}."
            fix = "Set `trainer_strategy: megatron` with `trainer_type: verl`, or remove it."
            yield Problem("trainer.megatron", message, fix)
        return
    if trainer.trainer_type is not TrainerType.VERL:
        message = f"Megatron runs through veRL, but trainer_type is {trainer.trainer_type}."
        fix = "Set `trainer_type: verl`, or `trainer_strategy: fsdp2`."
        yield case.problem("trainer.trainer_strategy", message, fix)
    if trainer.ulysses_sequence_parallel_size > 1:
        message = "Megatron splits sequences by `trainer.megatron.context_parallel_size`."
        key = "trainer.ulysses_sequence_parallel_size"
        yield case.problem(key, message, "Set that instead.")


def _mini_batch(case: Case) -> Iterator[Problem]:
    size, rows = case.config.trainer.mini_batch_size, case.config.buffer.train_batch_size
    if size is None or not rows or rows % size == 0:
        return
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    near = sorted(sorted(divisors, key=lambda n: abs(n - size))[:3])
    even = size * max(round(rows / size), 1)
    message = (
        f"The {rows} experiences of a training step (buffer.train_batch_size) are no whole number "
        f"of mini-batches of {size}."
    )
    fix = f"Set it to one of {', '.join(map(str, near))}, or `buffer.train_batch_size` to {even}."
    yield case.problem("trainer.mini_batch_size", message, fix)


def _critic_warmup(case: Case) -> Iterator[Problem]:
    if case.config.trainer.critic_warmup and not needs_critic(case.config):
        name = case.config.algorithm.algorithm_type
        message = f"{name} has no critic to warm up."
        fix = "Set it to 0, or use `algorithm_type: ppo`."
        yield case.problem("trainer.critic_warmup", message, fix)


def _offload(case: Case) -> Iterator[Problem]:
    trainer = case.config.trainer
    if trainer.grad_offload and trainer.trainer_strategy is not TrainerStrategy.MEGATRON:
        message = "Gradients alone are moved by Megatron only."
        fix = "Use `offload_policy: true` with fsdp2, or remove it."
        yield case.problem("trainer.grad_offload", message, fix)


def _packing(case: Case) -> Iterator[Problem]:
    trainer = case.config.trainer
    if trainer.trainer_type is TrainerType.TORCH and not trainer.use_remove_padding:
        message = "The torch backend always packs sequences without padding."
        yield case.problem("trainer.use_remove_padding", message, "Remove it.")


TRAINER_CHECKS: tuple[Check, ...] = (
    _loss_scale,
    _megatron,
    _mini_batch,
    _critic_warmup,
    _offload,
    _packing,
)
