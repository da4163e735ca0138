"""REC: group-relative REINFORCE with clips, weights and regularisers (arXiv:2509.24203).

Shape suffixes: B = rows, T = response tokens (padded).
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from trinity.algorithm.aggregate import aggregate_loss, as_metric, mean_metric
from trinity.algorithm.policy_loss_fn.base import Metrics, PolicyLossFn
from trinity.algorithm.policy_loss_fn.gspo import sequence_log_ratio
from trinity.algorithm.utils import MAX_LOG_RATIO, log_ratio, visible

ClipMode = Literal["none", "two-side", "one-side", "gspo-one-side", "ring"]
Weight = Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"]
Regularizer = Literal["none", "k2", "forward-kl"]


class RECPolicyLossFn(PolicyLossFn):
    """``-A weight logprob`` on kept tokens, plus a regulariser on all of them.

    Args:
        epsilon_low: How far below 1 a ratio is kept.
        epsilon_high: How far above 1 a ratio is kept.
        epsilon_low_prime: ``ring`` keeps positive advantages again this far below 1.
        epsilon_high_prime: ``ring`` keeps negative advantages again this far above 1.
        clip_mode: Which tokens are kept: all (``none``), those with a ratio inside the bounds
            (``two-side``), those that PPO would not clip (``one-side``; with the sequence's ratio
            ``gspo-one-side``), or two-side and the far ends that pull back (``ring``).
        weight: ``importance_sampling``: the token's ratio; ``gspo_importance_sampling``: the
            sequence's, with ``gspo-one-side`` only; ``advantage``: ``exp(A / temp)``.
        regularizer: ``k2``: ``coef (logprob - old_logprob)^2``; ``forward-kl``: ``-coef logprob``.
        regularizer_coef: That coefficient.
        temp: Temperature of ``weight: advantage``.
    """

    def __init__(
        self,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        epsilon_low_prime: float = 0.6,
        epsilon_high_prime: float = 2.0,
        clip_mode: ClipMode = "none",
        weight: Weight = "none",
        regularizer: Regularizer = "none",
        regularizer_coef: float = 0.0,
        temp: float = 1.0,
    ) -> None:
        for name, value, choices in (
            ("clip_mode", clip_mode, get_args(ClipMode)),
            ("weight", weight, get_args(Weight)),
            ("regularizer", regularizer, get_args(Regularizer)),
        ):
            if value not in choices:
                raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}.")
        if weight == "gspo_importance_sampling" and clip_mode != "gspo-one-side":
            raise ValueError(
                "weight 'gspo_importance_sampling' needs clip_mode 'gspo-one-side', not "
                f"{clip_mode!r}."
            )
        self.low, self.high = 1 - epsilon_low, 1 + epsilon_high
        self.far_low, self.far_high = 1 - epsilon_low_prime, 1 + epsilon_high_prime
        self.clip_mode, self.weight = clip_mode, weight
        self.regularizer, self.regularizer_coef = regularizer, regularizer_coef
        self.temp = temp

    def __call__(
        self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Metrics]:
        logprob, old_logprob, advantages = visible(action_mask, logprob, old_logprob, advantages)
        ratio_BT = log_ratio(logprob.detach(), old_logprob).exp()
        is_by_sequence = self.clip_mode == "gspo-one-side"
        clipped_BT = ratio_BT
        if is_by_sequence:
            log_ratio_B = sequence_log_ratio(logprob.detach(), old_logprob, action_mask)
            clipped_BT = log_ratio_B.exp()[:, None].expand_as(logprob)
        is_kept_BT = self._is_kept(clipped_BT, advantages)
        weighted_BT = advantages * self._weight(ratio_BT, clipped_BT, advantages)
        loss_BT = torch.where(is_kept_BT, -weighted_BT * logprob, torch.zeros_like(logprob))
        loss_BT = loss_BT + self._penalty(logprob, old_logprob)
        mode = "seq-mean-token-mean" if is_by_sequence else "token-mean"
        loss = aggregate_loss(loss_BT, action_mask, mode)
        return loss, {
            "rec_loss": as_metric(loss, action_mask),
            "pg_clipfrac": mean_metric((~is_kept_BT).float(), action_mask),
            "ppo_kl": mean_metric(old_logprob - logprob, action_mask),
        }

    def _is_kept(self, ratio_BT: Tensor, advantage_BT: Tensor) -> Tensor:
        if self.clip_mode == "none":
            return torch.ones_like(ratio_BT, dtype=torch.bool)
        is_inside_BT = (ratio_BT >= self.low) & (ratio_BT <= self.high)
        is_positive_BT, is_negative_BT = advantage_BT >= 0, advantage_BT <= 0
        if self.clip_mode == "two-side":
            return is_inside_BT
        if self.clip_mode == "ring":
            return (
                is_inside_BT
                | (is_positive_BT & (ratio_BT <= self.far_low))
                | (is_negative_BT & (ratio_BT >= self.far_high))
            )
        return (is_positive_BT & (ratio_BT <= self.high)) | (
            is_negative_BT & (ratio_BT >= self.low)
        )

    def _weight(self, ratio_BT: Tensor, clipped_BT: Tensor, advantage_BT: Tensor) -> Tensor:
        """[B, T] by the token's ratio, the one that is clipped, or the advantage."""
        if self.weight == "none":
            return torch.ones_like(ratio_BT)
        if self.weight == "advantage":
            return (advantage_BT / self.temp).clamp(max=MAX_LOG_RATIO).exp()
        return ratio_BT if self.weight == "importance_sampling" else clipped_BT

    def _penalty(self, logprob: Tensor, old_logprob: Tensor) -> Tensor:
        if self.regularizer == "k2":
            return self.regularizer_coef * (logprob - old_logprob).square()
        if self.regularizer == "forward-kl":
            return -self.regularizer_coef * logprob
        return torch.zeros_like(logprob)
