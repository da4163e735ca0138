"""GSPO: one clipped importance ratio per sequence (arXiv:2507.18071, eq. 5, 7 and 14).

Shape suffixes: B = rows, T = response tokens (padded).
"""

import warnings

import torch
from torch import Tensor

from trinity.algorithm.aggregate import aggregate_loss, as_metric, count_of, mean_metric
from trinity.algorithm.policy_loss_fn.base import Metrics, PolicyLossFn
from trinity.algorithm.utils import MAX_LOG_RATIO, masked_mean, visible


def sequence_log_ratio(logprob_BT: Tensor, old_logprob_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B] log of the geometric mean of a row's token ratios, cut to +-20; 0 for an empty row."""
    mean_B = masked_mean(logprob_BT - old_logprob_BT, mask_BT, axis=1)
    return mean_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


class GSPOPolicyLossFn(PolicyLossFn):
    """``max(-A s, -A clip(s))`` of every token, where ``s`` has the value of the sequence's ratio.

    Its gradient goes through the token's own log-probability (eq. 14), so advantages may differ
    by token. With ``seq-mean-token-mean`` this is the paper's objective; another mode gives long
    sequences more weight.

    Args:
        clip_range_low: How far below 1 the sequence ratio counts.
        clip_range_high: How far above 1 the sequence ratio counts.
        loss_agg_mode: See `trinity.algorithm.aggregate.aggregate_loss`.
    """

    def __init__(
        self,
        clip_range_low: float = 3e-4,
        clip_range_high: float = 4e-4,
        loss_agg_mode: str = "seq-mean-token-mean",
    ) -> None:
        if loss_agg_mode != "seq-mean-token-mean":
            warnings.warn(
                f"GSPO is defined with loss_agg_mode 'seq-mean-token-mean', not {loss_agg_mode!r}.",
                stacklevel=2,
            )
        self.clip_low, self.clip_high = clip_range_low, clip_range_high
        self.loss_agg_mode = loss_agg_mode

    def __call__(
        self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Metrics]:
        logprob, old_logprob, advantages = visible(action_mask, logprob, old_logprob, advantages)
        log_ratio_B = sequence_log_ratio(logprob.detach(), old_logprob, action_mask)
        ratio_BT = (logprob - logprob.detach() + log_ratio_B[:, None]).exp()
        free_BT = -advantages * ratio_BT
        clipped_BT = -advantages * ratio_BT.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = aggregate_loss(torch.maximum(free_BT, clipped_BT), action_mask, self.loss_agg_mode)
        num_rows = max(count_of(action_mask).rows, 1)
        return loss, {
            "pg_loss": as_metric(loss, action_mask),
            "pg_clipfrac": mean_metric((clipped_BT > free_BT).float(), action_mask),
            "ppo_kl": mean_metric(old_logprob - logprob, action_mask),
            "ppo_kl_seq": as_metric(-log_ratio_B.sum() / num_rows, action_mask),
        }
