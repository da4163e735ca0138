"""The critic's loss as the trainer wants it; its formula is in `trinity.algorithm.value_loss`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from trinity.algorithm.value_loss import value_loss
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
        loss, metrics = value_loss(
            outputs["values"],
            batch["old_values"],
            batch["returns"],
            batch["action_mask"],
            self.cliprange,
            self.loss_agg_mode,
        )
        return loss, {f"critic/{name}": value for name, value in metrics.items()}
