"""Rows of a `TrainBatch` as the TensorDict that veRL's engines take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.verl.loss import FILLER
from trinity.trainer.batch import TrainBatch


@dataclass(frozen=True)
class Way:
    """How rows go through a model.

    Args:
        rule: Size of a micro-batch.
        temperature: Where rows have none of their own.
        sequence_parallel: Ranks that share a row.
        packs: Without padding.
        fused: With veRL's fused kernels.
        entropy: Ask for the entropy too.
    """

    rule: MicroBatchRule
    temperature: float
    sequence_parallel: int
    packs: bool
    fused: bool
    entropy: bool


def tensordict_of(batch: TrainBatch, rows: Sequence[int], way: Way) -> Any:
    """``rows`` of ``batch``, filled up until all ranks have as many; called on all ranks at once.

    veRL cuts a rank's rows into as many micro-batches as any other rank's, none of them empty. A
    filler is a row of one token that counts nothing. Rows of a pair stay together.
    """
    from verl.utils import tensordict_utils

    unit = 2 if "pair_id" in batch else 1
    tokens = batch.row_tokens()
    lengths = [len(tokens[row]) for row in rows]
    longest = max((sum(lengths[i : i + unit]) for i in range(0, len(rows), unit)), default=unit)
    num_units, longest = _largest_of_ranks(max(1, len(rows) // unit), longest)
    cut, num_units = _cut(way, unit, num_units, longest)
    fillers = num_units * unit - len(rows)
    ids = [tokens[row].long() for row in rows] + [tokens[0][:1].long()] * fillers
    numbers = torch.tensor([*rows, *[FILLER] * fillers])
    heats = temperatures(batch, numbers, way.temperature or 1.0)
    return tensordict_utils.get_tensordict(
        {
            "input_ids": _nested(ids),
            "position_ids": _nested([torch.arange(len(row)) for row in ids]),
            "loss_mask": (numbers != FILLER).long(),
            "row": numbers,
            **({"temperature": heats} if isinstance(heats, Tensor) else {}),
        },
        non_tensor_dict={
            **cut,
            **({} if isinstance(heats, Tensor) else {"temperature": heats}),
            "force_group_size": unit,
            "use_remove_padding": way.packs,
            "use_fused_kernels": way.fused,
            "calculate_entropy": way.entropy,
            "pad_token_id": 0,
        },
    )


def _cut(way: Way, unit: int, num_units: int, longest: int) -> tuple[dict[str, object], int]:
    """veRL's settings for the size of micro-batches, and how many units every rank must have."""
    if way.rule.max_tokens is not None:
        needed = -(-longest // way.sequence_parallel)
        limit = max(way.rule.max_tokens, needed)
        return {"use_dynamic_bsz": True, "max_token_len_per_gpu": limit}, num_units
    size = num_units if way.rule.max_rows is None else way.rule.max_rows // unit
    size = min(max(1, size), num_units)
    whole = -(-num_units // size) * size
    return {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": size}, whole


def _largest_of_ranks(*figures: int) -> list[int]:
    """The largest of each figure over all ranks."""
    found = torch.tensor(figures)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [int(figure) for figure in found]


def temperatures(batch: TrainBatch, numbers: Tensor, default: float) -> float | Tensor:
    """Temperature of each row of these numbers; one number where all have the same.

    Rows without one of their own have ``default``. veRL's fused kernels take one number alone, and
    where that is 1 its others spare a copy of all logits.
    """
    rows = numbers[numbers != FILLER]
    if "temperature" not in batch or not len(rows):
        return default
    own = batch["temperature"].float()
    own = torch.where(own > 0, own, default)
    if bool((own[rows] == own[rows[0]]).all()):
        return float(own[rows[0]])
    return torch.where(numbers == FILLER, 1.0, own[numbers])


def _nested(rows: Sequence[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)
