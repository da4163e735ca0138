"""Random batches of the trainer's tensors, and losses evaluated on them whole or in pieces."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trinity.algorithm.aggregate import LossScope, loss_scope
from trinity.common.experience import EID, Experience

Batch = dict[str, Tensor]


def random_batch(seed: int, num_rows: int = 8, width: int = 6, mask_share: float = 0.3) -> Batch:
    """Rows 2k and 2k + 1 are a pair, and each row has at least one trained token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(num_rows, width, generator=generator)

    mask = torch.rand(num_rows, width, generator=generator) > mask_share
    mask[torch.arange(num_rows), torch.randint(width, (num_rows,), generator=generator)] = True
    logprob = -normal().abs()
    place = torch.arange(num_rows)
    return {
        "logprob": logprob,
        "old_logprob": logprob + normal(0.4),
        "ref_logprob": logprob + normal(0.4),
        "action_mask": mask,
        "advantages": normal(),
        "returns": normal(),
        "values": normal(),
        "old_values": normal(),
        "entropy": normal().abs(),
        "expert_mask": torch.rand(num_rows, generator=generator) > 0.5,
        "step": torch.full((num_rows,), 3, dtype=torch.int32),
        "pair_id": place // 2,
        "is_chosen": place % 2 == 0,
    }


def scope_of(batch: Batch) -> LossScope:
    return LossScope.of(batch["action_mask"], batch["expert_mask"], batch["pair_id"])


def rows_of(batch: Batch, rows: Sequence[int]) -> Batch:
    return {name: value[list(rows)] for name, value in batch.items()}


def with_masked_rows(batch: Batch, num_pairs: int, extra_width: int) -> Batch:
    """The batch with fully masked rows at its end and padding at its right, both full of NaN."""
    num_rows, width = batch["logprob"].shape
    wider: Batch = {}
    for name, value in batch.items():
        shape = list(value.shape)
        shape[0] += 2 * num_pairs
        if value.ndim == 2:
            shape[1] += extra_width
        garbage = float("nan") if value.is_floating_point() else 0
        wider[name] = torch.full(shape, garbage, dtype=value.dtype)
        wider[name][: len(value), *([slice(width)] if value.ndim == 2 else [])] = value
    place = torch.arange(num_rows + 2 * num_pairs)
    wider["pair_id"][num_rows:] = 1000 + place[num_rows:] // 2
    wider["is_chosen"] = place % 2 == 0
    wider["step"][num_rows:] = batch["step"][0]
    return wider


class Evaluation:
    """Loss, gradient by logprob, and the trainer's average of the metrics."""

    def __init__(self, loss: Tensor, gradient: Tensor, size: float, metrics: dict[str, float]):
        self.loss, self.gradient, self.size, self.metrics = loss, gradient, size, metrics


def evaluate(loss_fn, batch: Batch, pieces: Sequence[Sequence[int]] | None = None) -> Evaluation:
    """``loss_fn`` over the pieces (lists of rows) of a batch as the trainer sums and averages."""
    num_rows = len(batch["logprob"])
    pieces = pieces or [list(range(num_rows))]
    inputs = {name: value.clone() for name, value in batch.items()}
    inputs["logprob"].requires_grad_()
    inputs["values"].requires_grad_()
    inputs["entropy"].requires_grad_()
    shares, weights, reports = [], [], []
    with loss_scope(scope_of(batch)):
        for rows in pieces:
            part = rows_of(inputs, rows)
            loss, metrics = loss_fn(**{name: part[name] for name in loss_fn.inputs()})
            shares.append(loss)
            weights.append(float(part["action_mask"].sum()))
            reports.append(metrics)
    total = sum(shares)
    leaves = [inputs[name] for name in ("logprob", "values", "entropy")]
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    gradient = torch.stack(
        [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients)]
    )
    averaged = {
        name: sum(float(r[name]) * w for r, w in zip(reports, weights)) / sum(weights)
        for name in reports[0]
    }
    size = sum(abs(share.item()) for share in shares)
    return Evaluation(total.detach(), gradient, size, averaged)


def experience(
    reward: float | None,
    task: int = 0,
    run: int = 0,
    step: int = 0,
    mask: Sequence[bool] = (True, True),
    suffix: str | None = None,
    **fields,
) -> Experience:
    """An experience of one prompt token and as many response tokens as ``mask`` has entries."""
    return Experience(
        eid=EID(batch=0, task=task, run=run, step=step, suffix=suffix or f"{run}-{step}"),
        tokens=list(range(len(mask) + 1)),
        prompt_length=1,
        action_mask=list(mask),
        reward=reward,
        **fields,
    )
