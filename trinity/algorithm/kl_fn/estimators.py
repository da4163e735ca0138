"""Estimators of KL(policy || reference) from the log-probabilities of a sampled token.

k1, k2 and k3 are those of John Schulman, "Approximating KL divergence" (2020).
"""

import torch
from torch import Tensor

from trinity.algorithm.kl_fn.base import KLFn, Metrics
from trinity.algorithm.utils import MAX_LOG_RATIO

_MAX_LOW_VAR_KL = 10.0
_MAX_CORRECTION = 2.0


def k3(gap: Tensor) -> Tensor:
    """``exp(gap) - 1 - gap`` of ``gap = ref_logprob - logprob``, which is cut at 20 from above."""
    gap = gap.clamp(max=MAX_LOG_RATIO)
    return gap.exp() - 1 - gap


class NoKL(KLFn):
    """No KL at all: 0, and no reference model."""

    needs_reference = False

    def calculate_kl(
        self, logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor | None = None
    ) -> Tensor:
        return torch.zeros_like(logprob)

    def calculate_kl_loss(
        self,
        logprob: Tensor,
        ref_logprob: Tensor | None,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        old_logprob: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        return logprob.new_zeros(()), {}

    def apply_kl_penalty_to_reward(
        self,
        token_level_scores: Tensor,
        old_logprob: Tensor | None,
        ref_logprob: Tensor | None,
        action_mask: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        return token_level_scores, {}


class K1Fn(KLFn):
    """``logprob - ref_logprob``: unbiased, of high variance, negative at some tokens."""

    def calculate_kl(
        self, logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor | None = None
    ) -> Tensor:
        return logprob - ref_logprob


class K2Fn(KLFn):
    """``(logprob - ref_logprob)^2 / 2``: low variance, small bias near the reference."""

    def calculate_kl(
        self, logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor | None = None
    ) -> Tensor:
        return 0.5 * (logprob - ref_logprob).square()


class K3Fn(KLFn):
    """``exp(ref - lp) - 1 - (ref - lp)``: unbiased and never negative. The gap is cut at 20."""

    def calculate_kl(
        self, logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor | None = None
    ) -> Tensor:
        return k3(ref_logprob - logprob)


class LowVarKLFn(KLFn):
    """As `k3` with the gap cut to +-20, and the result to +-10."""

    def calculate_kl(
        self, logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor | None = None
    ) -> Tensor:
        gap = (ref_logprob - logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return k3(gap).clamp(-_MAX_LOW_VAR_KL, _MAX_LOW_VAR_KL)


class AbsFn(KLFn):
    """``|logprob - ref_logprob|``."""

    def calculate_kl(
        self, logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor | None = None
    ) -> Tensor:
        return (logprob - ref_logprob).abs()


class CorrectedK3Fn(KLFn):
    """As `k3`, weighted by ``clamp(exp(logprob - old_logprob), 0, 2)``.

    The weight makes the estimate one under the present policy although an older one sampled
    (DeepSeek-V3.2, arXiv:2512.02556, section 3.1), and its gradient is that of the KL.
    """

    def calculate_kl(
        self, logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor | None = None
    ) -> Tensor:
        if old_logprob is None:
            raise ValueError("corrected_k3 weights by the old policy: old_logprob is missing.")
        weight = (logprob - old_logprob).clamp(max=MAX_LOG_RATIO).exp().clamp(0, _MAX_CORRECTION)
        return weight * k3(ref_logprob - logprob)
