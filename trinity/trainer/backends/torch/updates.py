"""Gradients of an objective over a whole optimizer batch, micro-batch by micro-batch."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from trinity.algorithm.aggregate import LossScope, loss_scope
from trinity.trainer.backends.torch.microbatch import (
    MetricMeans,
    MicroBatchRule,
    plan_micro_batches,
)
from trinity.trainer.backends.torch.packing import PackedRows, pack_rows
from trinity.trainer.backends.torch.policy import Policy, TokenOutputs
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective

Outputs = dict[str, Tensor]


def scope_of(batch: TrainBatch) -> LossScope:
    """Counts of a whole optimizer batch."""
    columns = batch.columns()
    return LossScope.of(columns["action_mask"], columns.get("expert_mask"), columns.get("pair_id"))


def backward(
    policy: Policy, batch: TrainBatch, objective: Objective, rule: MicroBatchRule, scope: LossScope
) -> dict[str, float]:
    """Add the gradient of ``objective`` to the model's parameters; metrics of the batch."""
    if objective.adds_up(batch):
        return _backward_by_shares(policy, batch, objective, rule, scope)
    return _backward_in_two_passes(policy, batch, objective, rule, scope)


@torch.no_grad()
def token_outputs(
    policy: Policy, batch: TrainBatch, rule: MicroBatchRule, entropy: bool = False
) -> Outputs:
    """`Policy.token_outputs` of all rows, [B, T], without gradient."""
    width = batch["action_mask"].shape[1]
    found: Outputs = {}
    idle = torch.zeros(len(batch), dtype=torch.bool)
    for rows in plan_micro_batches(batch, rule, idle, policy.shares_prefixes):
        micro = batch.select(rows)
        for name, part in policy.token_outputs(micro, entropy).by_row(micro).items():
            whole = found.setdefault(name, part.new_zeros(len(batch), width))
            whole[rows, : part.shape[1]] = part
    return found


def _backward_by_shares(
    policy: Policy, batch: TrainBatch, objective: Objective, rule: MicroBatchRule, scope: LossScope
) -> dict[str, float]:
    means, losses = MetricMeans(), [0.0]
    idle = objective.idle_rows(batch)
    for rows in plan_micro_batches(batch, rule, idle, policy.shares_prefixes):
        micro = batch.select(rows)
        packed = pack_rows(micro, policy.shares_prefixes)
        is_idle = bool(idle[rows[0]])
        with torch.set_grad_enabled(not is_idle):
            hidden = policy.hidden(packed)
        grad = _head_backward(policy, hidden, packed, micro, objective, scope, means, losses)
        if grad is not None:
            hidden = policy.hidden(packed) if is_idle else hidden
            hidden.backward(grad)
    return {**means.result(), "actor/final_loss": math.fsum(losses)}


def _head_backward(
    policy: Policy,
    hidden: Tensor,
    packed: PackedRows,
    batch: TrainBatch,
    objective: Objective,
    scope: LossScope,
    means: MetricMeans,
    losses: list[float],
) -> Tensor | None:
    """Loss and gradient of the output layer, chunk by chunk; the gradient at ``hidden``.

    None if it is 0 everywhere.
    """
    grad = torch.zeros_like(hidden)
    has_gradient = False
    for chunk in policy.head_chunks(batch):
        leaf = hidden[chunk.tokens].detach().requires_grad_()
        part = batch.select(chunk.rows)
        trained = packed.trained.part(chunk.tokens, chunk.rows)
        with torch.enable_grad():
            outputs = policy.head(leaf, trained, part, objective.needs_entropy)
        gradient, loss, metrics = _gradient(outputs.by_row(part), part, objective, scope)
        losses.append(loss)
        means.add(metrics, part.num_trained_tokens)
        if any(bool(g.any()) for g in gradient.values()):
            has_gradient = True
            _backpropagate(outputs, gradient)
            assert leaf.grad is not None
            grad[chunk.tokens] = leaf.grad
    return grad if has_gradient else None


def _backward_in_two_passes(
    policy: Policy, batch: TrainBatch, objective: Objective, rule: MicroBatchRule, scope: LossScope
) -> dict[str, float]:
    """For a loss that is no sum over rows: its gradient at all outputs first, then the model's."""
    whole = token_outputs(policy, batch, rule, objective.needs_entropy)
    gradient, loss, metrics = _gradient(whole, batch, objective, scope)
    idle = ~torch.stack([g.any(dim=1) for g in gradient.values()]).any(dim=0)
    for rows in plan_micro_batches(batch, rule, idle, policy.shares_prefixes):
        if not idle[rows[0]]:
            micro = batch.select(rows)
            width = micro["action_mask"].shape[1]
            outputs = policy.token_outputs(micro, objective.needs_entropy)
            _backpropagate(outputs, {n: g[rows, :width] for n, g in gradient.items()})
    return {**{name: float(m) for name, m in metrics.items()}, "actor/final_loss": loss}


def _gradient(
    outputs: Outputs, batch: TrainBatch, objective: Objective, scope: LossScope
) -> tuple[Outputs, float, dict[str, Tensor]]:
    """Gradient of the loss at the outputs ([B, T]), the loss, and its metrics."""
    leaves = {name: value.detach().requires_grad_() for name, value in outputs.items()}
    with torch.enable_grad(), loss_scope(scope):
        loss, metrics = objective(leaves, batch)
    if loss.requires_grad:
        loss.backward()
    zero = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    gradient = {n: zero[n] if leaf.grad is None else leaf.grad for n, leaf in leaves.items()}
    return gradient, float(loss.detach()), metrics


def _backpropagate(outputs: TokenOutputs, gradient: Mapping[str, Tensor]) -> None:
    row, column = outputs.trained.row, outputs.trained.column
    values = [value for value in outputs.values.values() if value.requires_grad]
    names = [name for name, value in outputs.values.items() if value.requires_grad]
    torch.autograd.backward(values, [gradient[name][row, column] for name in names])
