"""SFT: maximum likelihood of the response. Shape suffixes: B = rows, T = response tokens."""

from torch import Tensor

from trinity.algorithm.aggregate import aggregate_loss, as_metric
from trinity.algorithm.policy_loss_fn.base import Metrics, PolicyLossFn


class SFTPolicyLossFn(PolicyLossFn):
    """``-log p`` of every trained token, averaged.

    Args:
        loss_agg_mode: See `trinity.algorithm.aggregate.aggregate_loss`.
    """

    def __init__(self, loss_agg_mode: str = "token-mean") -> None:
        self.loss_agg_mode = loss_agg_mode

    def __call__(self, logprob: Tensor, action_mask: Tensor) -> tuple[Tensor, Metrics]:
        loss = aggregate_loss(-logprob, action_mask, self.loss_agg_mode)
        return loss, {"sft_loss": as_metric(loss, action_mask)}
