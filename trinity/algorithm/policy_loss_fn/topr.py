"""TOPR: tapered off-policy REINFORCE (arXiv:2503.14286)."""

import torch
from torch import Tensor

from trinity.algorithm.aggregate import aggregate_loss, as_metric, mean_metric
from trinity.algorithm.policy_loss_fn.base import Metrics, PolicyLossFn
from trinity.algorithm.utils import log_ratio, visible


class TOPRPolicyLossFn(PolicyLossFn):
    """``-sg(alpha) A logprob``: alpha is 1 on good tokens, the ratio cut to [0, 1] on the others.

    The ratio is that of the token; the paper takes the whole response's.

    Args:
        advantage_threshold: Advantages above this are good.
        loss_agg_mode: See `trinity.algorithm.aggregate.aggregate_loss`.
    """

    def __init__(self, advantage_threshold: float = 0.0, loss_agg_mode: str = "token-mean") -> None:
        self.advantage_threshold = advantage_threshold
        self.loss_agg_mode = loss_agg_mode

    def __call__(
        self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Metrics]:
        logprob, old_logprob, advantages = visible(action_mask, logprob, old_logprob, advantages)
        tapered_BT = log_ratio(logprob.detach(), old_logprob).exp().clamp(0, 1)
        is_good_BT = advantages > self.advantage_threshold
        alpha_BT = torch.where(is_good_BT, torch.ones_like(tapered_BT), tapered_BT)
        loss = aggregate_loss(-alpha_BT * advantages * logprob, action_mask, self.loss_agg_mode)
        return loss, {
            "topr_loss": as_metric(loss, action_mask),
            "alpha": mean_metric(alpha_BT, action_mask),
            "ppo_kl": mean_metric(old_logprob - logprob, action_mask),
        }
