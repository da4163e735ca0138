"""Our loss behind veRL's loss function hook, and what the models say in our tensors.

veRL calls the hook once a micro-batch, with what the model says at every token of its rows, where
position t tells of token t + 1. Shape suffixes: B = rows, T = response tokens (padded).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trinity.algorithm.aggregate import LossScope, loss_scope
from trinity.trainer.backends.torch.microbatch import MetricMeans
from trinity.trainer.backends.torch.updates import Share
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import BatchObjective

Outputs = dict[str, Tensor]
_NAMES = {"log_probs": "logprob", "entropy": "entropy", "values": "values"}
FILLER = -1
"""Number of a row that only fills a micro-batch up."""


class MicroBatchHook:
    """What veRL calls: finds the rows of ``batch`` that a micro-batch holds, and their outputs."""

    def __init__(self, batch: TrainBatch) -> None:
        self.batch = batch

    def __call__(
        self, model_output: Mapping[str, Any], data: Any, dp_group: object = None
    ) -> tuple[Tensor, dict[str, float]]:
        given = data["row"].tolist()
        places = [place for place, row in enumerate(given) if row != FILLER]
        rows = [given[place] for place in places]
        part = self.batch.select(rows) if rows else None
        flat = next(iter(model_output.values())).values()
        if part is None:
            return flat.float().sum() * 0.0, {}
        outputs = _of_trained_tokens(model_output, part, places)
        loss = self.take(outputs, part, rows).to(flat.device)
        return (loss if loss.requires_grad else loss + flat.float().sum() * 0.0), {}

    def take(self, outputs: Outputs, part: TrainBatch, rows: Sequence[int]) -> Tensor:
        """The loss of ``part``, which are the ``rows`` of the batch."""
        raise NotImplementedError


class Collected(MicroBatchHook):
    """Keeps the outputs of all rows in ``outputs``, [B, T]; its loss means nothing."""

    def __init__(self, batch: TrainBatch) -> None:
        super().__init__(batch)
        self.outputs: Outputs = {}

    def take(self, outputs: Outputs, part: TrainBatch, rows: Sequence[int]) -> Tensor:
        width = self.batch["action_mask"].shape[1]
        for name, values in outputs.items():
            whole = self.outputs.setdefault(name, values.new_zeros(len(self.batch), width))
            whole[torch.as_tensor(rows), : values.shape[1]] = values.detach()
        return torch.zeros(())


class ObjectiveLoss(MicroBatchHook):
    """The share of an objective that a micro-batch has.

    Args:
        dp_size: Ranks over which veRL averages gradients; ours are sums.
    """

    def __init__(
        self, batch: TrainBatch, objective: BatchObjective, scope: LossScope, dp_size: int
    ) -> None:
        super().__init__(batch)
        self._objective, self._scope, self._dp_size = objective, scope, dp_size
        self._means, self._losses = MetricMeans(), [0.0]

    def take(self, outputs: Outputs, part: TrainBatch, rows: Sequence[int]) -> Tensor:
        with loss_scope(self._scope):
            loss, metrics = self._objective(outputs, part)
        self._losses.append(float(loss.detach()))
        self._means.add(metrics, part.num_trained_tokens)
        return loss * self._dp_size

    @property
    def share(self) -> Share:
        """What all micro-batches had, together."""
        return Share(math.fsum(self._losses), self._means.result(), self.batch.num_trained_tokens)


class GradientLoss(MicroBatchHook):
    """A loss whose gradient at the outputs is the given one ([B, T])."""

    def __init__(self, batch: TrainBatch, gradient: Mapping[str, Tensor], dp_size: int) -> None:
        super().__init__(batch)
        self._gradient, self._dp_size = gradient, dp_size

    def take(self, outputs: Outputs, part: TrainBatch, rows: Sequence[int]) -> Tensor:
        total = torch.zeros(())
        index = torch.as_tensor(rows)
        for name, wanted in self._gradient.items():
            values = outputs[name]
            total = total + (values * wanted[index, : values.shape[1]]).sum()
        return total * self._dp_size


def _of_trained_tokens(
    model_output: Mapping[str, Any], part: TrainBatch, places: Sequence[int]
) -> Outputs:
    """Outputs on the CPU, [B, T], 0 where masked; ``places`` are the rows' in the micro-batch."""
    row, column = part["action_mask"].nonzero(as_tuple=True)
    outputs = {}
    for name, ours in _NAMES.items():
        if name in model_output:
            nested = model_output[name]
            start = nested.offsets().cpu()[torch.as_tensor(places)] + part["prompt_length"] - 1
            values = nested.values()[(start[row] + column).to(nested.device)].float().cpu()
            empty = values.new_zeros(part["action_mask"].shape)
            outputs[ours] = empty.index_put((row, column), values)
    return outputs
