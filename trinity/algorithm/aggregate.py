"""From a loss per token to one number that does not depend on how the batch was cut up.

A loss of an optimizer step is a sum over its tokens, divided by counts of the whole step. The
trainer opens a `loss_scope` with those counts; inside it `aggregate_loss` of a micro-batch is that
micro-batch's share, and the shares of all micro-batches and data-parallel ranks add up to the loss.

Shape suffixes: B = rows (one experience each), T = response tokens (padded).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from trinity.algorithm.utils import masked_sum
from trinity.common.config.algorithm import LOSS_AGG_MODES


@dataclass(frozen=True)
class Counts:
    """How much a loss is a mean of."""

    tokens: int
    """Tokens that are trained on."""

    rows: int
    """Rows with at least one such token."""

    @classmethod
    def of(cls, mask_BT: Tensor) -> "Counts":
        return cls(tokens=int(mask_BT.sum()), rows=int(mask_BT.any(dim=1).sum()))

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.tokens + other.tokens, self.rows + other.rows)


@dataclass(frozen=True)
class LossScope:
    """What one optimizer step is made of, over all its micro-batches and ranks.

    Args:
        counts: Counts of the whole step by part: ``all``, and of a mixed batch ``expert`` and
            ``usual``; ``pairs`` counts the complete preference pairs in its ``rows``.
        horizon: Length up to the last trained token of the longest row; ``seq-mean-token-sum-norm``
            divides by it. Neither padding nor masked rows change it.
    """

    counts: Mapping[str, Counts]
    horizon: int

    @classmethod
    def of(
        cls, action_mask: Tensor, expert_mask: Tensor | None = None, pair_id: Tensor | None = None
    ) -> "LossScope":
        """The scope of a whole optimizer batch.

        Args:
            action_mask: [B, T] True on trained tokens.
            expert_mask: [B] True on rows of expert data.
            pair_id: [B] equal for the two rows of a preference pair.
        """
        mask_BT = action_mask.bool()
        counts = {"all": Counts.of(mask_BT)}
        if expert_mask is not None:
            counts["expert"] = Counts.of(mask_BT & expert_mask.bool()[:, None])
            counts["usual"] = Counts.of(mask_BT & ~expert_mask.bool()[:, None])
        if pair_id is not None:
            is_whole_B = complete_pairs(pair_id, mask_BT)
            pairs = Counts.of(mask_BT & is_whole_B[:, None])
            counts["pairs"] = Counts(pairs.tokens, pairs.rows // 2)
        positions = mask_BT.any(dim=0).nonzero()
        return cls(counts, horizon=int(positions.max()) + 1 if len(positions) else 0)


def complete_pairs(pair_id: Tensor, mask_BT: Tensor) -> Tensor:
    """[B] True on the rows of pairs whose two answers both have trained tokens."""
    is_live_B = mask_BT.any(dim=1)
    same_BB = (pair_id[:, None] == pair_id[None, :]) & is_live_B[None, :]
    return is_live_B & (same_BB.sum(dim=1) == 2)


_SCOPE: ContextVar[LossScope | None] = ContextVar("loss_scope", default=None)


@contextmanager
def loss_scope(scope: LossScope) -> Iterator[LossScope]:
    """Losses computed inside are shares of the step that ``scope`` describes."""
    token = _SCOPE.set(scope)
    try:
        yield scope
    finally:
        _SCOPE.reset(token)


def current_scope() -> LossScope | None:
    """The scope in force; None outside of any, where a batch is a whole step of its own."""
    return _SCOPE.get()


def count_of(mask: Tensor, part: str = "all") -> Counts:
    """Counts to divide by: those of the scope for ``part``, or of ``mask`` outside any scope."""
    scope = _SCOPE.get()
    if scope is None:
        return Counts.of(mask.bool())
    if part not in scope.counts:
        raise ValueError(
            f"The loss is averaged over the part {part!r}, but the loss scope counts only "
            f"{sorted(scope.counts)}: give expert_mask (or pair_id) to LossScope.of."
        )
    return scope.counts[part]


def aggregate_loss(
    values: Tensor,
    mask: Tensor,
    loss_agg_mode: str = "token-mean",
    normalizer: float | None = None,
    part: str = "all",
) -> Tensor:
    """One number from a loss per token.

    ========================= ===================================================
    ``token-mean``            sum over tokens / tokens
    ``seq-mean-token-sum``    sum over tokens / rows
    ``seq-mean-token-mean``   sum over rows of the mean over their tokens / rows
    ``seq-mean-token-sum-norm`` sum over tokens / (``normalizer`` or the horizon)
    ========================= ===================================================

    Tokens and rows are those of the whole optimizer step (see `LossScope`); rows whose mask is all
    False count nowhere. The last mode is Dr. GRPO's without the mean over rows.

    Args:
        values: [B, T] loss of each token.
        mask: [B, T] True on trained tokens (of this part).
        loss_agg_mode: One of the modes above.
        normalizer: Tokens to divide by in ``seq-mean-token-sum-norm``.
        part: Which of the scope's counts to divide by.

    Raises:
        ValueError: The mode is unknown, or nothing in the whole step is trained on.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(
            f"loss_agg_mode is {loss_agg_mode!r}; choose one of {', '.join(LOSS_AGG_MODES)}."
        )
    counts = count_of(mask, part)
    if counts.rows == 0 and part == "all":
        raise ValueError("No token of this batch is trained on: skip it, its loss is not 0.")
    sum_B = masked_sum(values, mask, axis=1)
    if loss_agg_mode == "token-mean":
        return sum_B.sum() / max(counts.tokens, 1)
    if loss_agg_mode == "seq-mean-token-sum":
        return sum_B.sum() / max(counts.rows, 1)
    if loss_agg_mode == "seq-mean-token-mean":
        return (sum_B / mask.sum(dim=1).clamp(min=1)).sum() / max(counts.rows, 1)
    scope = _SCOPE.get() or LossScope.of(mask)
    return sum_B.sum() / (normalizer or max(scope.horizon, 1))


def mean_metric(
    values: Tensor, action_mask: Tensor, rows: Tensor | None = None, part: str = "all"
) -> Tensor:
    """Mean over the trained tokens of a part, as a metric that the trainer averages.

    Args:
        values: [B, T] a number per token.
        action_mask: [B, T] True on trained tokens, of all parts.
        rows: [B] True on the rows of the part; all of them if None.
        part: The part those rows are, as counted in the scope.
    """
    mask = action_mask.bool() if rows is None else action_mask.bool() & rows[:, None]
    return as_metric(aggregate_loss(values.detach(), mask, part=part), action_mask)


def as_metric(share: Tensor, mask: Tensor) -> Tensor:
    """A share of a number of the whole step, as a metric that the trainer averages.

    The trainer weights a micro-batch's metrics by its trained tokens (``mask``). Scaled by the
    inverse of that weight, shares of any kind average to their sum: the number of the whole step.
    """
    scope = _SCOPE.get()
    if scope is None:
        return share.detach()
    own = mask.bool().sum()
    scaled = share.detach() * (scope.counts["all"].tokens / own.clamp(min=1))
    return torch.where(own > 0, scaled, torch.zeros_like(scaled))
