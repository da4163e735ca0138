"""Gradients of an objective over an optimizer batch, micro-batch by micro-batch."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trinity.algorithm.aggregate import LossScope, loss_scope
from trinity.common.constants import ROUTES
from trinity.trainer.backends.torch.microbatch import MetricMeans, MicroBatch
from trinity.trainer.backends.torch.packed_model import (
    Arriving,
    HeadChunk,
    PackedModel,
    TokenOutputs,
)
from trinity.trainer.backends.torch.packing import PackedRows
from trinity.trainer.backends.torch.varlen import sent
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import BatchObjective

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Share:
    """What a part of an optimizer batch contributes: its share of the loss, and metric means."""

    loss: float
    metrics: Mapping[str, float]
    num_tokens: int

    @staticmethod
    def total(shares: Sequence["Share"], loss_name: str) -> dict[str, float]:
        """Metrics of the whole batch, and its loss under ``loss_name``."""
        means = MetricMeans()
        for share in shares:
            if share.num_tokens:
                means.add(share.metrics, share.num_tokens)
        return {**means.result(), loss_name: math.fsum(share.loss for share in shares)}


def scope_of(batch: TrainBatch) -> LossScope:
    """Counts of a whole optimizer batch."""
    columns = batch.columns()
    return LossScope.of(columns["action_mask"], columns.get("expert_mask"), columns.get("pair_id"))


@torch.no_grad()
def token_outputs(
    model: PackedModel, batch: TrainBatch, plan: Sequence[MicroBatch], entropy: bool = False
) -> Outputs:
    """`PackedModel.token_outputs` of all rows, [B, T], without gradient."""
    width = batch["action_mask"].shape[1]
    found: Outputs = {}
    for micro in plan:
        if not micro.rows:
            model.hidden(model.pack(_any_row(batch)))
            continue
        part = batch.select(micro.rows)
        for name, values in model.token_outputs(part, entropy).by_row(part).items():
            whole = found.setdefault(name, values.new_zeros(len(batch), width))
            whole[micro.rows, : values.shape[1]] = values
    return found


def backward(
    model: PackedModel,
    batch: TrainBatch,
    objective: BatchObjective,
    plan: Sequence[MicroBatch],
    scope: LossScope,
) -> Share:
    """Add the gradient of an objective whose shares add up to the model's parameters."""
    means, losses = MetricMeans(), [0.0]
    num_busy = sum(not micro.is_idle for micro in plan)
    for number, micro in enumerate(plan, 1):
        is_last = number >= num_busy  # what is idle has none, most likely
        if not micro.rows:
            _take_part(model, batch, micro, is_last)
            continue
        part = batch.select(micro.rows)
        packed = model.pack(part)
        with torch.set_grad_enabled(not micro.is_idle):
            hidden = model.hidden(packed)
        rows = part.without(ROUTES)  # large, and done with: each chunk would copy its own
        grad = _head_backward(model, hidden, packed, rows, objective, scope, means, losses)
        if model.goes_back(grad is not None, is_last):
            hidden = model.hidden(packed) if micro.is_idle else hidden
            model.before_backward(is_last)
            hidden.backward(torch.zeros_like(hidden) if grad is None else grad)
    return Share(math.fsum(losses), means.result(), batch.num_trained_tokens)


def backward_from(
    model: PackedModel,
    batch: TrainBatch,
    gradient: Mapping[str, Tensor],
    plan: Sequence[MicroBatch],
) -> None:
    """Add to the model's parameters the gradient that follows from that at its outputs ([B, T])."""
    for number, micro in enumerate(plan, 1):
        is_last = number == len(plan)
        if not micro.rows:
            _add_nothing(model, model.hidden(model.pack(_any_row(batch))), is_last)
            continue
        part = batch.select(micro.rows)
        width = part["action_mask"].shape[1]
        packed = model.pack(part)
        hidden = model.hidden(packed)
        leaf = hidden.detach().requires_grad_()
        outputs = model.outputs(leaf, packed.trained, part, "entropy" in gradient)
        _backpropagate(outputs, {n: values[micro.rows, :width] for n, values in gradient.items()})
        model.before_backward(is_last)
        hidden.backward(leaf.grad)


def gradient_at_outputs(
    outputs: Outputs, batch: TrainBatch, objective: BatchObjective, scope: LossScope
) -> tuple[Outputs, Share]:
    """Gradient of the loss at the outputs ([B, T]), and the loss with its metrics."""
    leaves = {name: value.detach().requires_grad_() for name, value in outputs.items()}
    with torch.enable_grad(), loss_scope(scope):
        loss, metrics = objective(leaves, batch)
    if loss.requires_grad:
        loss.backward()
    gradient = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in leaves.items()
    }
    plain = {name: float(value) for name, value in metrics.items()}
    return gradient, Share(float(loss.detach()), plain, batch.num_trained_tokens)


def _head_backward(
    model: PackedModel,
    hidden: Tensor,
    packed: PackedRows,
    batch: TrainBatch,
    objective: BatchObjective,
    scope: LossScope,
    means: MetricMeans,
    losses: list[float],
) -> Tensor | None:
    """Loss and gradient of the output layer, chunk by chunk; the gradient at ``hidden``.

    None if it is 0 everywhere. A GPU works on the next chunk while the loss of one is computed on
    the CPU: so it holds two of them.
    """
    grad = torch.zeros_like(hidden)
    has_gradient = False
    ahead = 1 if hidden.is_cuda else 0
    started: deque[_Started] = deque()

    def finish(begun: _Started) -> bool:
        rows = begun.outputs.by_row(begun.part, begun.arriving)
        gradient, share = gradient_at_outputs(rows, begun.part, objective, scope)
        losses.append(share.loss)
        means.add(share.metrics, share.num_tokens)
        if not any(bool(g.any()) for g in gradient.values()):
            return False
        _backpropagate(begun.outputs, gradient)
        assert begun.leaf.grad is not None
        grad[begun.tokens] = begun.leaf.grad
        return True

    for chunk in model.chunks(batch):
        started.append(_start(model, hidden, packed, batch, chunk, objective.needs_entropy))
        if len(started) > ahead:
            has_gradient |= finish(started.popleft())
    for begun in started:
        has_gradient |= finish(begun)
    return grad if has_gradient else None


@dataclass(frozen=True)
class _Started:
    """A chunk whose outputs are being computed, from a ``leaf`` of the hidden states."""

    tokens: slice
    leaf: Tensor
    part: TrainBatch
    outputs: TokenOutputs
    arriving: Arriving


def _start(
    model: PackedModel,
    hidden: Tensor,
    packed: PackedRows,
    batch: TrainBatch,
    chunk: HeadChunk,
    entropy: bool,
) -> _Started:
    leaf = hidden[chunk.tokens].detach().requires_grad_()
    part = batch.select(chunk.rows)
    trained = packed.trained.part(chunk.tokens, chunk.rows)
    with torch.enable_grad():
        outputs = model.outputs(leaf, trained, part, entropy)
    return _Started(chunk.tokens, leaf, part, outputs, outputs.leaving())


def _backpropagate(outputs: TokenOutputs, gradient: Mapping[str, Tensor]) -> None:
    row, column = outputs.trained.row, outputs.trained.column
    names = [name for name, value in outputs.values.items() if value.requires_grad]
    values = [outputs.values[name] for name in names]
    found = [sent(gradient[n][row, column], v.device) for n, v in zip(names, values, strict=True)]
    torch.autograd.backward(values, found)


def _any_row(batch: TrainBatch) -> TrainBatch:
    """A batch of one row, for a pass whose result nobody needs."""
    return batch.select([int(batch["action_mask"].any(dim=1).nonzero()[0])])


def _take_part(model: PackedModel, batch: TrainBatch, micro: MicroBatch, is_last: bool) -> None:
    """Do what the other ranks do in this micro-batch of `backward`, on any row."""
    packed = model.pack(_any_row(batch))
    with torch.set_grad_enabled(not micro.is_idle):
        hidden = model.hidden(packed)
    if model.goes_back(False, is_last):
        _add_nothing(model, model.hidden(packed) if micro.is_idle else hidden, is_last)


def _add_nothing(model: PackedModel, hidden: Tensor, is_last: bool) -> None:
    """A backward pass with a gradient of 0, for the other ranks' sake."""
    model.before_backward(is_last)
    hidden.backward(torch.zeros_like(hidden))
