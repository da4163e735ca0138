"""The critic's loss: squared error to the return, with the step clipped (PPO's value loss)."""

import torch
from torch import Tensor

from trinity.algorithm.aggregate import aggregate_loss, as_metric, mean_metric
from trinity.algorithm.utils import visible

Metrics = dict[str, Tensor]


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    action_mask: Tensor,
    cliprange_value: float = 0.5,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Metrics]:
    """``max((V - R)^2, (clip(V) - R)^2) / 2`` of every trained token, averaged.

    Args:
        values: [B, T] the critic's present output.
        old_values: [B, T] its output when the batch arrived.
        returns: [B, T] what it should have said.
        action_mask: [B, T] True on trained tokens.
        cliprange_value: How far V may move from ``old_values`` and still lower the loss.
        loss_agg_mode: See `trinity.algorithm.aggregate.aggregate_loss`.
    """
    values, old_values, returns = visible(action_mask, values, old_values, returns)
    near = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    free_BT, clipped_BT = (values - returns).square(), (near - returns).square()
    loss = 0.5 * aggregate_loss(torch.maximum(free_BT, clipped_BT), action_mask, loss_agg_mode)
    return loss, {
        "vf_loss": as_metric(loss, action_mask),
        "vf_clipfrac": mean_metric((clipped_BT > free_BT).float(), action_mask),
        "vpred_mean": mean_metric(values, action_mask),
    }
