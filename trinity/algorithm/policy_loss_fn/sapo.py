"""SAPO: a smooth gate on the ratio in place of a clip (arXiv:2511.20347)."""

import torch
from torch import Tensor

from trinity.algorithm.aggregate import aggregate_loss, as_metric, mean_metric
from trinity.algorithm.policy_loss_fn.base import Metrics, PolicyLossFn
from trinity.algorithm.utils import log_ratio, visible


class SAPOPolicyLossFn(PolicyLossFn):
    """``-A sg(gate(ratio)) logprob`` with ``gate(x) = 4 / tau * sigmoid(tau (x - 1))``.

    The gate is a weight here. The paper differentiates the gate itself, ``-A gate(ratio)``, whose
    gradient fades on both sides of ratio 1: ``gate_as_weight: false`` is that.

    Args:
        tau_pos: Sharpness of the gate where the advantage is positive.
        tau_neg: Sharpness elsewhere; at least ``tau_pos``, as negative advantages unsettle more.
        gate_as_weight: False for the paper's objective.
        loss_agg_mode: See `trinity.algorithm.aggregate.aggregate_loss`.
    """

    def __init__(
        self,
        tau_pos: float = 1.0,
        tau_neg: float = 1.05,
        gate_as_weight: bool = True,
        loss_agg_mode: str = "token-mean",
    ) -> None:
        if not 0 < tau_pos <= tau_neg:
            raise ValueError(f"tau_neg is {tau_neg}; it must be at least tau_pos ({tau_pos}).")
        self.tau_pos, self.tau_neg = tau_pos, tau_neg
        self.gate_as_weight = gate_as_weight
        self.loss_agg_mode = loss_agg_mode

    def __call__(
        self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Metrics]:
        logprob, old_logprob, advantages = visible(action_mask, logprob, old_logprob, advantages)
        ratio_BT = log_ratio(logprob, old_logprob).exp()
        tau_BT = torch.full_like(ratio_BT, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        gate_BT = torch.sigmoid(tau_BT * (ratio_BT - 1)) * 4 / tau_BT
        value_BT = gate_BT.detach() * logprob if self.gate_as_weight else gate_BT
        loss = aggregate_loss(-advantages * value_BT, action_mask, self.loss_agg_mode)
        return loss, {
            "pg_loss": as_metric(loss, action_mask),
            "ppo_kl": mean_metric(old_logprob - logprob, action_mask),
            "gate": mean_metric(gate_BT, action_mask),
        }
