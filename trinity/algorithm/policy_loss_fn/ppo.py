"""PPO: the clipped surrogate, with dual clip and off-policy sequence masking.

arXiv:1707.06347, eq. 7; dual clip: arXiv:1912.09729; sequence masking: DeepSeek-V3.2,
arXiv:2512.02556, section 3.1. Shape suffixes: B = rows, T = response tokens (padded).
"""

import torch
from torch import Tensor

from trinity.algorithm.aggregate import aggregate_loss, as_metric, count_of, mean_metric
from trinity.algorithm.policy_loss_fn.base import Metrics, PolicyLossFn
from trinity.algorithm.utils import log_ratio, masked_mean, visible


def ppo_token_loss(
    log_ratio_BT: Tensor,
    advantage_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``, at most ``-A dual_clip`` for A < 0.

    Returns:
        Loss of each token, where the clip is in force, and where the dual clip is.
    """
    ratio_BT = log_ratio_BT.exp()
    free_BT = -advantage_BT * ratio_BT
    clipped_BT = -advantage_BT * ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    upper_BT = torch.maximum(free_BT, clipped_BT)
    ceiling_BT = -advantage_BT * dual_clip
    is_negative_BT = advantage_BT < 0
    loss_BT = torch.where(is_negative_BT, torch.minimum(upper_BT, ceiling_BT), upper_BT)
    return loss_BT, clipped_BT > free_BT, is_negative_BT & (upper_BT > ceiling_BT)


class PPOPolicyLossFn(PolicyLossFn):
    """``max(-A ratio, -A clip(ratio, 1 - low, 1 + high))``; for A < 0 at most ``-A clip_ratio_c``.

    Args:
        clip_range: Both sides of the clip, unless one of the next two is given.
        clip_range_low: How far below 1 the ratio counts.
        clip_range_high: How far above 1 the ratio counts.
        clip_ratio_c: Dual clip: the ratio at which the loss of a negative advantage stops growing.
        loss_agg_mode: See `trinity.algorithm.aggregate.aggregate_loss`.
        enable_sequence_masking: Give no weight to negative advantages in rows that have drifted:
            those whose mean ``old_logprob - logprob`` is above ``delta_sequence_masking``. They
            still count in the denominator.
        delta_sequence_masking: That bound, in nats per token.
        fallback_to_policy_gradient: Take the present policy as the old one: ratio 1, so that the
            gradient is that of REINFORCE.
    """

    def __init__(
        self,
        clip_range: float = 0.2,
        clip_range_low: float | None = None,
        clip_range_high: float | None = None,
        clip_ratio_c: float = 3.0,
        loss_agg_mode: str = "token-mean",
        enable_sequence_masking: bool = False,
        delta_sequence_masking: float = 0.1,
        fallback_to_policy_gradient: bool = False,
    ) -> None:
        if clip_ratio_c <= 1:
            raise ValueError(f"clip_ratio_c is {clip_ratio_c}; it must be above 1.")
        self.clip_low = clip_range if clip_range_low is None else clip_range_low
        self.clip_high = clip_range if clip_range_high is None else clip_range_high
        self.dual_clip = clip_ratio_c
        self.loss_agg_mode = loss_agg_mode
        self.enable_sequence_masking = enable_sequence_masking
        self.delta_sequence_masking = delta_sequence_masking
        self.fallback_to_policy_gradient = fallback_to_policy_gradient

    def __call__(
        self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Metrics]:
        return self.share(logprob, old_logprob, action_mask, advantages)

    def share(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        rows: Tensor | None = None,
        part: str = "all",
    ) -> tuple[Tensor, Metrics]:
        """The loss over ``rows`` ([B] bool; all if None) as a mean over ``part`` of the step."""
        mask_BT = action_mask.bool() if rows is None else action_mask.bool() & rows[:, None]
        logprob, old_logprob, advantages = visible(mask_BT, logprob, old_logprob, advantages)
        origin_BT = logprob.detach() if self.fallback_to_policy_gradient else old_logprob
        log_ratio_BT = log_ratio(logprob, origin_BT)
        loss_BT, is_clipped_BT, is_dual_BT = ppo_token_loss(
            log_ratio_BT,
            advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        per_token = {
            "pg_clipfrac": is_clipped_BT.float(),
            "pg_clipfrac_lower": is_dual_BT.float(),
            "ppo_kl": -log_ratio_BT,
        }
        metrics: Metrics = {}
        if self.enable_sequence_masking:
            kl_B = masked_mean(-log_ratio(logprob, old_logprob), mask_BT, axis=1)
            is_dropped_BT = (kl_B > self.delta_sequence_masking)[:, None] & (advantages < 0)
            loss_BT = loss_BT.masked_fill(is_dropped_BT, 0.0)
            num_rows = max(count_of(mask_BT, part).rows, 1)
            per_token["seq_mask/masked_tokens"] = is_dropped_BT.float()
            metrics["seq_mask/mean_sequence_kl"] = as_metric(kl_B.sum() / num_rows, action_mask)
        loss = aggregate_loss(loss_BT, mask_BT, self.loss_agg_mode, part=part)
        metrics["pg_loss"] = as_metric(loss, action_mask)
        for name, value_BT in per_token.items():
            metrics[name] = mean_metric(value_BT, action_mask, rows, part)
        return loss, metrics
