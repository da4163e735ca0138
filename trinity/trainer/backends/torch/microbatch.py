"""Cut a batch into micro-batches, by tokens or by rows, and average their metrics."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trinity.trainer.batch import TrainBatch


@dataclass(frozen=True)
class MicroBatchRule:
    """How large a micro-batch is.

    Args:
        max_tokens: Packed tokens at most; a prompt shared by rows counts once. A unit that is
            larger by itself is a micro-batch of its own. None: no bound.
        max_rows: Rows at most; None: no bound.
    """

    max_tokens: int | None = None
    max_rows: int | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together.

    Args:
        rows: Rows of the batch; none: this rank only takes part in what all ranks do together.
        is_idle: They most likely have no gradient.
    """

    rows: list[int]
    is_idle: bool = False


def plan_micro_batches(
    batch: TrainBatch,
    rule: MicroBatchRule,
    idle: Tensor | None = None,
    shares_prefixes: bool = True,
) -> list[MicroBatch]:
    """Micro-batches of all rows that have a trained token.

    Rows of a group stay side by side, so that their prompt is computed once; rows marked ``idle``
    ([B]) come last, together, so that their micro-batches can do without a backward pass.
    """
    is_idle = [False] * len(batch) if idle is None else idle.tolist()
    trained = batch["action_mask"].any(dim=1).tolist()
    units = [[r for r in unit if trained[r]] for unit in batch.units()]
    group, prompt = batch["group_id"].tolist(), batch["prompt_length"].tolist()
    length = batch.lengths.tolist()
    order = sorted(
        (unit for unit in units if unit), key=lambda unit: (is_idle[unit[0]], group[unit[0]], unit)
    )
    blocks: list[list[int]] = []
    tokens = 0
    for unit in order:
        whole = sum(length[row] for row in unit)
        last = blocks[-1][-1] if blocks else None
        is_same = shares_prefixes and last is not None and group[last] == group[unit[0]]
        cost = sum(length[row] - prompt[row] for row in unit) if is_same else whole
        fits = (
            last is not None
            and is_idle[last] == is_idle[unit[0]]
            and (rule.max_tokens is None or tokens + cost <= rule.max_tokens)
            and (rule.max_rows is None or len(blocks[-1]) + len(unit) <= rule.max_rows)
        )
        if fits:
            blocks[-1] += unit
            tokens += cost
        else:
            blocks.append(list(unit))
            tokens = whole
    return [MicroBatch(rows, is_idle[rows[0]]) for rows in blocks]


class MetricMeans:
    """Metrics of a step from those of its micro-batches.

    Means are weighted by trained tokens; what has ``max`` or ``min`` in its name is that.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def add(self, metrics: Mapping[str, Tensor | float], num_tokens: int) -> None:
        for name, value in metrics.items():
            self._values[name].append((float(value), num_tokens))

    def result(self) -> dict[str, float]:
        return {name: _combine(name, pairs) for name, pairs in self._values.items()}


def _combine(name: str, pairs: Sequence[tuple[float, int]]) -> float:
    words = re.split(r"[_/]", name)
    if "max" in words:
        return max(value for value, _ in pairs)
    if "min" in words:
        return min(value for value, _ in pairs)
    return sum(value * count for value, count in pairs) / sum(count for _, count in pairs)
