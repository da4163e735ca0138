"""Importance-weighted policy gradient without a clip."""

from torch import Tensor

from trinity.algorithm.aggregate import aggregate_loss, as_metric, mean_metric
from trinity.algorithm.policy_loss_fn.base import Metrics, PolicyLossFn
from trinity.algorithm.utils import log_ratio, visible


class ImportanceSamplingPolicyLossFn(PolicyLossFn):
    """``-A ratio``, unbiased for the policy gradient of the tokens given their prefixes.

    Args:
        loss_agg_mode: See `trinity.algorithm.aggregate.aggregate_loss`.
    """

    def __init__(self, loss_agg_mode: str = "token-mean") -> None:
        self.loss_agg_mode = loss_agg_mode

    def __call__(
        self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Metrics]:
        logprob, old_logprob, advantages = visible(action_mask, logprob, old_logprob, advantages)
        log_ratio_BT = log_ratio(logprob, old_logprob)
        loss = aggregate_loss(-advantages * log_ratio_BT.exp(), action_mask, self.loss_agg_mode)
        return loss, {
            "pg_loss": as_metric(loss, action_mask),
            "ppo_kl": mean_metric(-log_ratio_BT, action_mask),
        }
