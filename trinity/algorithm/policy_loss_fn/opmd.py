"""OPMD: online policy mirror descent in its simplest form (arXiv:2509.24203, section 2.2)."""

from torch import Tensor

from trinity.algorithm.aggregate import aggregate_loss, as_metric
from trinity.algorithm.policy_loss_fn.base import Metrics, PolicyLossFn
from trinity.algorithm.utils import visible


class OPMDPolicyLossFn(PolicyLossFn):
    """``-A logprob / (1 + tau)``: no ratio, so old data counts like new.

    Args:
        tau: Strength of the pull to the last policy; it shortens the step.
        loss_agg_mode: See `trinity.algorithm.aggregate.aggregate_loss`.
    """

    def __init__(self, tau: float = 1.0, loss_agg_mode: str = "token-mean") -> None:
        self.tau = tau
        self.loss_agg_mode = loss_agg_mode

    def __call__(
        self, logprob: Tensor, action_mask: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Metrics]:
        logprob, advantages = visible(action_mask, logprob, advantages)
        mean = aggregate_loss(-advantages * logprob, action_mask, self.loss_agg_mode)
        loss = mean / (1 + self.tau)
        return loss, {"opmd_loss": as_metric(loss, action_mask)}
