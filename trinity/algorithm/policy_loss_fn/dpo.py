"""DPO: the margin of the chosen over the rejected answer (arXiv:2305.18290, eq. 7).

With label smoothing it is conservative DPO (Mitchell, "A note on DPO with noisy preferences").
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trinity.algorithm.aggregate import as_metric, complete_pairs, current_scope
from trinity.algorithm.policy_loss_fn.base import Metrics, PolicyLossFn
from trinity.algorithm.utils import masked_sum


class DPOPolicyLossFn(PolicyLossFn):
    """``-(1 - ls) logsigmoid(beta d) - ls logsigmoid(-beta d)``, averaged over pairs.

    ``d`` is the log ratio to the reference of the chosen row less that of the rejected one, each
    summed over its own tokens. A pair with an answer of no trained token is left out.

    The loss itself compares with the reference, so that model is loaded whatever `kl_loss_fn` is:
    `kl_loss_fn: none` leaves out the KL term that is added to this loss, and nothing else.

    Args:
        beta: How hard the policy is held to the reference.
        label_smoothing: Probability ``ls`` that a preference is the wrong way round.
    """

    unit = "pair"

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0) -> None:
        self.beta, self.label_smoothing = beta, label_smoothing

    def __call__(
        self,
        logprob: Tensor,
        ref_logprob: Tensor,
        action_mask: Tensor,
        pair_id: Tensor | None = None,
        is_chosen: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Rows of a pair share ``pair_id``; without ids, rows 0, 2, ... are the chosen ones."""
        num_rows = len(logprob)
        if pair_id is None or is_chosen is None:
            place = torch.arange(num_rows, device=logprob.device)
            pair_id, is_chosen = place // 2, place % 2 == 0
        chosen, rejected = rows_of_pairs(pair_id, is_chosen.bool(), action_mask.bool())
        reward_B = self.beta * masked_sum(logprob - ref_logprob, action_mask, axis=1)
        margin = reward_B[chosen] - reward_B[rejected]
        loss_of_pair = -(1 - self.label_smoothing) * logsigmoid(margin)
        loss_of_pair = loss_of_pair - self.label_smoothing * logsigmoid(-margin)
        num_pairs = _num_pairs(len(chosen))
        loss = loss_of_pair.sum() / num_pairs
        per_pair = {
            "chosen_reward": reward_B[chosen],
            "rejected_reward": reward_B[rejected],
            "accuracy_mean": (margin > 0).float(),
        }
        metrics = {
            name: as_metric(value.sum() / num_pairs, action_mask)
            for name, value in per_pair.items()
        }
        return loss, {"dpo_loss": as_metric(loss, action_mask), **metrics}


def rows_of_pairs(pair_id: Tensor, is_chosen: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers of the chosen and of the rejected answers, pair by pair.

    Raises:
        ValueError: A row's partner is not in the batch, or both are chosen, or both rejected.
    """
    partners_B = (pair_id[:, None] == pair_id[None, :]).sum(dim=1)
    is_live_B = mask_BT.any(dim=1)
    if bool((is_live_B & (partners_B != 2)).any()):
        raise ValueError("A preference pair is not whole: its two rows must be in one micro-batch.")
    rows = complete_pairs(pair_id, mask_BT).nonzero()[:, 0]
    rows = rows[torch.argsort((~is_chosen[rows]).int(), stable=True)]
    rows = rows[torch.argsort(pair_id[rows], stable=True)]
    chosen, rejected = rows[0::2], rows[1::2]
    if not bool(is_chosen[chosen].all() and (~is_chosen[rejected]).all()):
        raise ValueError("A preference pair needs one chosen and one rejected row.")
    return chosen, rejected


def _num_pairs(own: int) -> int:
    """Pairs of the whole step, to average over; ``own`` are those of this batch."""
    scope = current_scope()
    if scope is None:
        total = own
    elif "pairs" in scope.counts:
        total = scope.counts["pairs"].rows
    else:
        total = scope.counts["all"].rows // 2
    if total == 0:
        raise ValueError("No preference pair of this batch is whole: skip it, its loss is not 0.")
    return total
