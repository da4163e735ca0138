"""Correction for the gap between the engine that sampled and the trainer that learns.

Engine and trainer give one token slightly different probabilities even with equal weights. With
``algorithm.bypass_old_logprobs: false`` the trainer recomputes the old log-probabilities, and the
ratio to the engine's says how far apart they are. That ratio, on tokens or on whole sequences, is
used as an importance weight (cut off, or 0 outside the bounds) and to reject what is too far off.

Truncated importance sampling: Yao et al., "Your efficient RL framework secretly brings you
off-policy RL training" (2025). Masked: Liu et al., "When speed kills stability" (2025).
Shape suffixes: B = rows, T = response tokens (padded).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from trinity.algorithm.base import Method
from trinity.algorithm.utils import (
    MAX_LOG_RATIO,
    log_ratio,
    masked_mean,
    masked_sum,
    sampled,
    visible,
)

Level = Literal["token", "sequence", "geometric"]
Metrics = dict[str, float]


@dataclass(frozen=True)
class Correction:
    """What a batch's correction amounts to."""

    weights: Tensor
    """[B, T] without gradient: multiply the advantages by them."""

    mask: Tensor
    """[B, T] tokens that are left to train on."""

    metrics: Metrics
    """How far engine and trainer are apart, under ``rollout_corr/``."""


class RolloutCorrection(Method):
    """Weights and mask for a batch, from the log-probabilities of trainer and engine.

    A level is ``token`` (each token's ratio), ``sequence`` (the product over the row) or
    ``geometric`` (the row's geometric mean).

    Args:
        rollout_is: Level of the importance weights; None weights nothing.
        rollout_is_threshold: Largest weight.
        rollout_is_threshold_lower: Smallest weight that ``mask`` lets pass; None is the inverse of
            the largest.
        rollout_is_mode: ``truncate`` cuts a weight to the largest; ``mask`` makes it 0 outside the
            bounds. The token still counts in the loss's denominator.
        rollout_is_batch_normalize: Divide the weights by their mean over the trained tokens.
        rollout_rs: Level on which tokens or rows are rejected; None rejects nothing. They leave the
            loss altogether, denominator included.
        rollout_rs_threshold: Largest ratio that is accepted.
        rollout_rs_threshold_lower: Smallest; None is the inverse of the largest.
        rollout_token_veto_threshold: Reject rows with a token whose ratio is below this; None does
            not look.
    """

    def __init__(
        self,
        rollout_is: Level | None = None,
        rollout_is_threshold: float = 2.0,
        rollout_is_threshold_lower: float | None = None,
        rollout_is_mode: Literal["truncate", "mask"] = "truncate",
        rollout_is_batch_normalize: bool = False,
        rollout_rs: Level | None = None,
        rollout_rs_threshold: float = 2.0,
        rollout_rs_threshold_lower: float | None = None,
        rollout_token_veto_threshold: float | None = None,
    ) -> None:
        for name, level in (("rollout_is", rollout_is), ("rollout_rs", rollout_rs)):
            if level is not None and level not in get_args(Level):
                raise ValueError(f"{name} is {level!r}; choose {', '.join(get_args(Level))}.")
        if rollout_is_mode not in ("truncate", "mask"):
            raise ValueError(f"rollout_is_mode is {rollout_is_mode!r}; choose truncate or mask.")
        self.is_level, self.is_mode = rollout_is, rollout_is_mode
        self.is_bounds = _bounds("rollout_is", rollout_is_threshold_lower, rollout_is_threshold)
        self.is_normalized = rollout_is_batch_normalize
        self.rs_level = rollout_rs
        self.rs_bounds = _bounds("rollout_rs", rollout_rs_threshold_lower, rollout_rs_threshold)
        self.veto = rollout_token_veto_threshold

    def __call__(
        self, old_logprob: Tensor, rollout_logprob: Tensor, action_mask: Tensor
    ) -> Correction:
        """The correction of a whole optimizer batch.

        Args:
            old_logprob: [B, T] of the sampled tokens by the trainer, before the update.
            rollout_logprob: [B, T] of the same tokens by the engine.
            action_mask: [B, T] True on trained tokens.
        """
        mask_BT = action_mask.bool()
        old_BT, rollout_BT = visible(mask_BT, old_logprob.detach(), rollout_logprob)
        kept_BT = self._accepted(old_BT, rollout_BT, mask_BT)
        weight_BT = self._weights(old_BT, rollout_BT, mask_BT, kept_BT)
        metrics = mismatch_metrics(old_BT, rollout_BT, mask_BT)
        metrics |= _weight_metrics(weight_BT, mask_BT, kept_BT)
        named = {f"rollout_corr/{name}": value for name, value in metrics.items()}
        return Correction(weight_BT, kept_BT, named)

    def of_batch(self, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Metrics]:
        """The correction of a trainer's batch, as columns that change, and metrics.

        Reads ``old_logprob``, ``rollout_log_probs`` and ``action_mask``. Gives the ``action_mask``
        that is left, and ``rollout_weights`` to multiply the advantages by. Rows of expert data
        (``expert_mask``), which no engine sampled, stay as they are.
        """
        sampled_BT = sampled(batch)
        found = self(batch["old_logprob"], batch["rollout_log_probs"], sampled_BT)
        expert_BT = batch["action_mask"].bool() & ~sampled_BT
        weight_BT = torch.where(expert_BT, 1.0, found.weights)
        changed = {"action_mask": found.mask | expert_BT, "rollout_weights": weight_BT}
        return changed, found.metrics

    def _weights(
        self, old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, kept_BT: Tensor
    ) -> Tensor:
        if self.is_level is None:
            return mask_BT.to(old_BT.dtype)
        low, high = self.is_bounds
        ratio_BT = level_ratio(old_BT, rollout_BT, mask_BT, self.is_level)
        if self.is_mode == "truncate":
            weight_BT = ratio_BT.clamp(max=high)
        else:
            weight_BT = torch.where((ratio_BT >= low) & (ratio_BT <= high), ratio_BT, 0.0)
        if self.is_normalized:
            mean = masked_mean(weight_BT, kept_BT)
            weight_BT = torch.where(mean > 0, weight_BT / mean, weight_BT)
        return torch.where(mask_BT, weight_BT, 0.0)

    def _accepted(self, old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor) -> Tensor:
        kept_BT = mask_BT
        if self.rs_level is not None:
            low, high = self.rs_bounds
            ratio_BT = level_ratio(old_BT, rollout_BT, mask_BT, self.rs_level)
            kept_BT = kept_BT & (ratio_BT >= low) & (ratio_BT <= high)
        if self.veto is not None:
            ratio_BT = level_ratio(old_BT, rollout_BT, mask_BT, "token")
            is_vetoed_B = ((ratio_BT < self.veto) & mask_BT).any(dim=1)
            kept_BT = kept_BT & ~is_vetoed_B[:, None]
        return kept_BT


def level_ratio(old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """[B, T] ratio of trainer's to engine's probability, equal along a row but for ``token``."""
    if level == "token":
        return log_ratio(old_BT, rollout_BT).exp()
    gap_BT = old_BT - rollout_BT
    combine = masked_sum if level == "sequence" else masked_mean
    log_B = combine(gap_BT, mask_BT, 1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_B.exp()[:, None].expand_as(gap_BT)


def mismatch_metrics(old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor) -> Metrics:
    """How far the trainer's probabilities are from the engine's, on the sampled tokens.

    ``kl`` is the k1 and ``k3_kl`` the k3 estimate of KL(engine || trainer) per token; the ratios
    are those of tokens, ``log_ratio_abs_max`` is the widest gap.
    """
    gap_BT = log_ratio(old_BT, rollout_BT)
    ratio_BT = gap_BT.exp()
    live = gap_BT[mask_BT]
    if not len(live):
        return {}
    return {
        "kl": float(-live.mean()),
        "k3_kl": float((ratio_BT - 1 - gap_BT)[mask_BT].mean()),
        "ratio_mean": float(ratio_BT[mask_BT].mean()),
        "ratio_max": float(ratio_BT[mask_BT].max()),
        "ratio_min": float(ratio_BT[mask_BT].min()),
        "log_ratio_abs_max": float(live.abs().max()),
    }


def effective_sample_size(weight: Tensor) -> float:
    """``(sum w)^2 / (n sum w^2)``, in (0, 1]: the share of samples that weights leave in effect."""
    exact = weight.double()
    square = exact.square().sum() * len(exact)
    return float(exact.sum().square() / square) if float(square) > 0 else 0.0


def _weight_metrics(weight_BT: Tensor, mask_BT: Tensor, kept_BT: Tensor) -> Metrics:
    live, num_rows = weight_BT[kept_BT], int(mask_BT.any(dim=1).sum())
    if not num_rows:
        return {}
    num_kept_rows = int(kept_BT.any(dim=1).sum())
    shares = {
        "rejected_tokens": 1 - int(kept_BT.sum()) / int(mask_BT.sum()),
        "rejected_rows": 1 - num_kept_rows / num_rows,
    }
    if not len(live):
        return shares
    return shares | {
        "weight_mean": float(live.mean()),
        "weight_max": float(live.max()),
        "ess": effective_sample_size(live),
    }


def _bounds(name: str, low: float | None, high: float) -> tuple[float, float]:
    least = 1 / high if low is None and high > 0 else low
    if least is None or not 0 <= least <= high or high <= 0:
        raise ValueError(
            f"{name}_threshold_lower is {low} and {name}_threshold is {high}: the bounds of a "
            "ratio need 0 <= lower <= upper, and upper above 0."
        )
    return least, high
