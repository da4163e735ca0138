"""The numbers of a step: tasks, samples, tokens, updates, micro-batches, staleness."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trinity.common.config.gpus import GPUSplit, ranks_per_row
from trinity.common.config.root import Config
from trinity.common.config.training import training_settings
from trinity.common.constants import SyncStyle
from trinity.utils.words import Span

EXPERT_DATA_RATIO = 0.5
"""`expert_data_ratio` of `mix` where the file does not name it."""


@dataclass(frozen=True)
class Arithmetic:
    """What one step of a run is made of. Token counts are upper bounds.

    Args:
        tasks: Tasks of an explorer step; 0 where there is no explorer.
        samples: Samples of a task.
        experiences: Experiences an explorer step makes.
        prompt_tokens: Prompt tokens of an explorer step, each prompt counted once.
        response_tokens: Response tokens of an explorer step.
        train_batch: Experiences of a training step.
        train_tokens: Tokens of a training step, prompts counted with every sample.
        steps_per_explorer_step: Training steps for each explorer step.
        epochs: Passes over each training batch.
        copies: Copies of the model that share a batch (data parallel size).
        rows_per_gpu: Experiences of a training step on each copy.
        micro_batches: Micro-batches of an update on each copy, at most.
        sync_interval: Steps between two syncs.
        sync_offset: Steps the explorer runs ahead.
        max_staleness: Most training steps between sampling and training; None if unbounded.
    """

    tasks: int
    samples: Span
    experiences: Span
    prompt_tokens: int
    response_tokens: int
    train_batch: int
    train_tokens: int
    steps_per_explorer_step: Span
    epochs: int
    copies: int
    rows_per_gpu: int
    micro_batches: int
    sync_interval: int
    sync_offset: int
    max_staleness: int | None


def rollouts_per_step(config: Config) -> int:
    """Experiences of a training step that the explorer makes: `mix` takes the rest from data."""
    size, algorithm = config.buffer.train_batch_size, config.algorithm
    if algorithm.sample_strategy != "mix":
        return size
    ratio = (algorithm.sample_strategy_args or {}).get("expert_data_ratio", EXPERT_DATA_RATIO)
    return size - expert_rows(size, float(ratio))


def expert_rows(batch_size: int, ratio: float) -> int:
    """Rows of a batch of `mix` that are expert data."""
    return math.ceil(ratio * batch_size)


def arithmetic_of(config: Config, split: GPUSplit) -> Arithmetic:
    """The numbers of ``config``, which must be filled in."""
    model, buffer = config.model, config.buffer
    tasks = buffer.batch_size if config.mode.explores else 0
    samples = config.sample_span
    prompt, response = model.max_prompt_tokens or 0, model.max_response_tokens or 0
    rows = buffer.train_batch_size
    copies = max(split.trainer // ranks_per_row(config.trainer), 1)
    rollouts = rollouts_per_step(config)
    made, per_step = samples.times(tasks), Span(1, 1)
    if rollouts and tasks and config.mode.pairs:
        per_step = Span(made.least / rollouts, made.most / rollouts)
    per_gpu = -(-rows // copies)
    return Arithmetic(
        tasks=tasks,
        samples=samples,
        experiences=made,
        prompt_tokens=tasks * prompt,
        response_tokens=int(made.most) * response,
        train_batch=rows if config.mode.trains else 0,
        train_tokens=rows * (model.max_model_len or prompt + response),
        steps_per_explorer_step=per_step,
        epochs=config.trainer.ppo_epochs,
        copies=copies,
        rows_per_gpu=per_gpu,
        micro_batches=_micro_batches(config, per_gpu),
        sync_interval=config.synchronizer.sync_interval,
        sync_offset=config.synchronizer.sync_offset,
        max_staleness=max_staleness(config, per_step.most),
    )


def _micro_batches(config: Config, rows: int) -> int:
    """With full-length rows: as many as fit the tokens, or the rows, of one pass."""
    limit = training_settings(config).actor.train
    longest = config.model.max_model_len or 1
    fitting = limit.max_rows
    if limit.max_tokens is not None:
        fitting = limit.max_tokens // longest
    return -(-rows // max(fitting or 1, 1))


def max_staleness(config: Config, steps_per_explorer_step: float = 1.0) -> int | None:
    """Most training steps that an experience can be behind the weights it trains."""
    sync, algorithm = config.synchronizer, config.algorithm
    if not config.mode.pairs:
        return None
    bound = (algorithm.sample_strategy_args or {}).get("max_staleness")
    if algorithm.sample_strategy == "staleness_control" and isinstance(bound, int):
        return bound
    if sync.sync_style is not SyncStyle.FIXED:
        return None
    span = (sync.sync_interval + sync.sync_offset) * steps_per_explorer_step
    return max(math.ceil(span) - 1, 0)
