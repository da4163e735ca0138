"""CLIP_B and CLIP_V: GRPO that leaves the tokens out of the loss which drain the entropy most.

To first order, a step of size ``eta A`` on a sampled token k changes the entropy H of its
distribution p by ``-eta A (S_k - sum_i p_i S_i)`` with ``S_i = p_i (H + log p_i)``
(arXiv:2602.03392). For ``A < 0`` the entropy falls where S is far below its mean.

Shape suffixes: B = rows, T = response tokens (padded), V = vocabulary.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from trinity.algorithm.advantage_fn.base import Metrics
from trinity.algorithm.advantage_fn.grpo_verl import GRPOAdvantageFn
from trinity.algorithm.utils import masked_mean, masked_var, visible

_NO_SPREAD = 1e-12


def entropy_score(logprob: Tensor, entropy: Tensor) -> Tensor:
    """``S = p (H + log p)`` of the sampled token."""
    return logprob.exp() * (entropy + logprob)


def expected_entropy_score(logits_V: Tensor) -> Tensor:
    """``sum_i p_i S_i`` over the vocabulary (last dim): what a batch carries as ``necs``."""
    logprob_V = logits_V.float().log_softmax(dim=-1)
    p_V = logprob_V.exp()
    entropy = -(p_V * logprob_V).sum(dim=-1, keepdim=True)
    return (p_V * entropy_score(logprob_V, entropy)).sum(dim=-1)


class CLIPBAdvantageFn(GRPOAdvantageFn):
    """GRPO that drops tokens of negative advantage with ``S - mean(S) < -mu std(S)``.

    ``S = p (H + log p)`` of the sampled token, with H the entropy of its distribution; mean and std
    are over the trained tokens of the batch.

    Args:
        epsilon: Added to the std of the group.
        mu: How many deviations below the mean a token may lie.
    """

    requires: ClassVar[tuple[str, ...]] = ("old_logprob", "entropy")

    def __init__(self, epsilon: float = 1e-6, mu: float = 2.5) -> None:
        super().__init__(epsilon)
        self.mu = mu

    def loss_mask(self, batch: Mapping[str, Tensor], advantages: Tensor) -> tuple[Tensor, Metrics]:
        """Scores are of the policy that sampled: ``rollout_log_probs`` if the batch has them."""
        mask_BT = batch["action_mask"].bool()
        logprob_BT = batch.get("rollout_log_probs", batch["old_logprob"])
        score_BT = _score(logprob_BT, batch["entropy"], mask_BT)
        mean, var = masked_mean(score_BT, mask_BT), masked_var(score_BT, mask_BT, unbiased=False)
        std = var.sqrt()
        is_far_BT = (score_BT - mean < -self.mu * std) & (std >= _NO_SPREAD)
        is_dropped_BT = mask_BT & (advantages < 0) & is_far_BT
        metrics = _clip_metrics(is_dropped_BT, advantages, mask_BT)
        return mask_BT & ~is_dropped_BT, {**metrics, "ES": float(mean), "varS": float(var)}


class CLIPVAdvantageFn(GRPOAdvantageFn):
    """GRPO that drops tokens of advantage 0 or less with ``D > mu std(D)``, where ``D = E[S] - S``.

    S is that of `clipb`, and its mean E[S] is over the vocabulary (``necs`` in the batch).

    Args:
        epsilon: Added to the std of the group.
        mu: How many deviations D may reach.
        max_frac: Largest share of the trained tokens to drop; beyond it, those of largest D.
    """

    requires: ClassVar[tuple[str, ...]] = ("old_logprob", "entropy", "necs")

    def __init__(self, epsilon: float = 1e-6, mu: float = 8.5, max_frac: float = 1e-4) -> None:
        super().__init__(epsilon)
        self.mu, self.max_frac = mu, max_frac

    def loss_mask(self, batch: Mapping[str, Tensor], advantages: Tensor) -> tuple[Tensor, Metrics]:
        mask_BT = batch["action_mask"].bool()
        score_BT = _score(batch["old_logprob"], batch["entropy"], mask_BT)
        drain_BT = visible(mask_BT, batch["necs"])[0] - score_BT
        var = masked_var(drain_BT, mask_BT, unbiased=False)
        std = var.sqrt()
        is_far_BT = (drain_BT > self.mu * std) & (std >= _NO_SPREAD)
        is_dropped_BT = mask_BT & (advantages <= 0) & is_far_BT
        is_dropped_BT = self._at_most(is_dropped_BT, drain_BT, int(mask_BT.sum()))
        metrics = _clip_metrics(is_dropped_BT, advantages, mask_BT)
        drain = float(masked_mean(drain_BT, mask_BT))
        return mask_BT & ~is_dropped_BT, {**metrics, "ED": drain, "varD": float(var)}

    def _at_most(self, is_dropped_BT: Tensor, drain_BT: Tensor, num_tokens: int) -> Tensor:
        """The tokens to drop, cut to the worst ``max_frac`` of all trained ones (at least one)."""
        if int(is_dropped_BT.sum()) <= self.max_frac * num_tokens:
            return is_dropped_BT
        k = max(int(self.max_frac * num_tokens), 1)
        worst = drain_BT[is_dropped_BT].topk(k).values[-1]
        return is_dropped_BT & (drain_BT >= worst)


def _score(logprob_BT: Tensor, entropy_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return entropy_score(*visible(mask_BT, logprob_BT.float(), entropy_BT.float()))


def _clip_metrics(is_dropped_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> Metrics:
    """Shares of tokens that were dropped: of all, of positive and of negative advantage."""

    def share(of_BT: Tensor) -> float:
        return float(masked_mean(is_dropped_BT.float(), of_BT))

    return {
        "frac_clipped": share(mask_BT),
        "frac_clipped_pos": share(mask_BT & (advantage_BT > 0)),
        "frac_clipped_neg": share(mask_BT & (advantage_BT < 0)),
    }
