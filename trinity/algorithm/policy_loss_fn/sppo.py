"""sPPO: the log ratio as surrogate, inside a trust region (arXiv:2108.05828)."""

import torch
from torch import Tensor

from trinity.algorithm.aggregate import aggregate_loss, as_metric, mean_metric
from trinity.algorithm.policy_loss_fn.base import Metrics, PolicyLossFn
from trinity.algorithm.utils import log_ratio, visible


class SPPOPolicyLossFn(PolicyLossFn):
    """``-A (logprob - old_logprob)`` where ``1 / (1 + eps) <= ratio <= 1 + eps``, else 0.

    Args:
        epsilon: Half width of the trust region.
        loss_agg_mode: See `trinity.algorithm.aggregate.aggregate_loss`.
    """

    def __init__(self, epsilon: float = 0.3, loss_agg_mode: str = "token-mean") -> None:
        if epsilon <= 0:
            raise ValueError(f"epsilon is {epsilon}; it must be above 0.")
        self.epsilon = epsilon
        self.loss_agg_mode = loss_agg_mode

    def __call__(
        self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Metrics]:
        logprob, old_logprob, advantages = visible(action_mask, logprob, old_logprob, advantages)
        log_ratio_BT = log_ratio(logprob, old_logprob)
        ratio_BT = log_ratio_BT.detach().exp()
        is_near_BT = (ratio_BT >= 1 / (1 + self.epsilon)) & (ratio_BT <= 1 + self.epsilon)
        loss_BT = torch.where(is_near_BT, -advantages * log_ratio_BT, torch.zeros_like(ratio_BT))
        loss = aggregate_loss(loss_BT, action_mask, self.loss_agg_mode)
        return loss, {
            "sppo_loss": as_metric(loss, action_mask),
            "ppo_kl": mean_metric(-log_ratio_BT, action_mask),
            "pg_clipfrac": mean_metric((~is_near_BT).float(), action_mask),
        }
