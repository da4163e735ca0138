"""The critic's loss: squared error of the values, clipped around the old ones.

arXiv:1707.06347 in the form of its authors' code. Shape suffixes: B = rows, T = response tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from trinity.algorithm.aggregate import aggregate_loss, mean_metric
from trinity.trainer.batch import TrainBatch

Metrics = dict[str, Tensor]


class ValueObjective:
    """``1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)``, averaged.

    Args:
        cliprange: c, in the unit of the reward.
        loss_agg_mode: See `trinity.algorithm.aggregate.aggregate_loss`.
    """

    loss_name = "critic/vf_loss"
    needs_entropy = False

    def __init__(self, cliprange: float = 0.5, loss_agg_mode: str = "token-mean") -> None:
        if cliprange <= 0:
            raise ValueError(f"cliprange_value is {cliprange}; it must be above 0.")
        self.cliprange = cliprange
        self.loss_agg_mode = loss_agg_mode

    def adds_up(self, batch: TrainBatch) -> bool:
        """A mean over tokens: always."""
        return True

    def idle_rows(self, batch: TrainBatch) -> Tensor:
        """None: a value is hardly ever exactly right."""
        return torch.zeros(len(batch), dtype=torch.bool)

    def __call__(self, outputs: Mapping[str, Tensor], batch: TrainBatch) -> tuple[Tensor, Metrics]:
        value_BT, old_BT, return_BT = outputs["values"], batch["old_values"], batch["returns"]
        mask_BT = batch["action_mask"]
        near_BT = old_BT + (value_BT - old_BT).clamp(-self.cliprange, self.cliprange)
        free_BT, clipped_BT = (value_BT - return_BT).square(), (near_BT - return_BT).square()
        loss_BT = 0.5 * torch.maximum(free_BT, clipped_BT)
        loss = aggregate_loss(loss_BT, mask_BT, self.loss_agg_mode)
        clipped_share = mean_metric((clipped_BT > free_BT).float(), mask_BT)
        return loss, {
            "critic/vf_clipfrac": clipped_share,
            "critic/vpred_mean": mean_metric(value_BT, mask_BT),
        }
