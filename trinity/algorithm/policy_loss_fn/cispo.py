"""CISPO: the clipped ratio as a constant weight (MiniMax-M1, arXiv:2506.13585)."""

import torch
from torch import Tensor

from trinity.algorithm.aggregate import aggregate_loss, as_metric, mean_metric
from trinity.algorithm.policy_loss_fn.base import Metrics, PolicyLossFn
from trinity.algorithm.utils import log_ratio, visible


class CISPOPolicyLossFn(PolicyLossFn):
    """``-A sg(clip(ratio)) mask logprob``: no token loses its gradient to the clip.

    Args:
        clip_range_low: How far below 1 the weight may fall; 1 is no bound.
        clip_range_high: How far above 1 the weight may rise.
        enable_mask_clip: Drop the tokens that PPO's clip would mute, by the next two.
        mask_clip_range_low: For a negative advantage, drop ratios this far below 1.
        mask_clip_range_high: For a positive advantage, drop ratios this far above 1.
        loss_agg_mode: See `trinity.algorithm.aggregate.aggregate_loss`.
    """

    def __init__(
        self,
        clip_range_low: float = 1.0,
        clip_range_high: float = 0.28,
        enable_mask_clip: bool = False,
        mask_clip_range_low: float = 1.0,
        mask_clip_range_high: float = 0.28,
        loss_agg_mode: str = "token-mean",
    ) -> None:
        self.clip_low, self.clip_high = clip_range_low, clip_range_high
        self.enable_mask_clip = enable_mask_clip
        self.mask_low, self.mask_high = mask_clip_range_low, mask_clip_range_high
        self.loss_agg_mode = loss_agg_mode

    def __call__(
        self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Metrics]:
        logprob, old_logprob, advantages = visible(action_mask, logprob, old_logprob, advantages)
        ratio_BT = log_ratio(logprob.detach(), old_logprob).exp()
        weight_BT = ratio_BT.clamp(1 - self.clip_low, 1 + self.clip_high)
        kept_BT = torch.ones_like(ratio_BT)
        if self.enable_mask_clip:
            kept_BT[(advantages > 0) & (ratio_BT > 1 + self.mask_high)] = 0.0
            kept_BT[(advantages < 0) & (ratio_BT < 1 - self.mask_low)] = 0.0
        loss_BT = -advantages * weight_BT * kept_BT * logprob
        loss = aggregate_loss(loss_BT, action_mask, self.loss_agg_mode)
        return loss, {
            "cispo_loss": as_metric(loss, action_mask),
            "ppo_kl": mean_metric(old_logprob - logprob, action_mask),
            "unmasked_frac": mean_metric(kept_BT, action_mask),
        }
