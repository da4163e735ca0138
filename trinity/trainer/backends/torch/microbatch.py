"""Cut a batch into micro-batches, by tokens or by rows, and average their metrics."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby

from torch import Tensor

from trinity.trainer.batch import TrainBatch
from trinity.utils.metrics import extreme_in

_EVEN_TO = 0.02  # of the most tokens: how evenly micro-batches are filled


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

    def has_room(self, tokens: int, rows: Sequence[int]) -> bool:
        """Whether a micro-batch may hold that much."""
        return (self.max_tokens is None or tokens <= self.max_tokens) and (
            self.max_rows is None or len(rows) <= self.max_rows
        )


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

    Rows of a group stay side by side, so that their prompt is computed once, and groups stay whole
    where that takes no more micro-batches; these are about as large as each other. Rows marked
    ``idle`` ([B]) come last, together, so that their micro-batches can do without a backward pass.
    """
    is_idle = [False] * len(batch) if idle is None else idle.tolist()
    trained = batch["action_mask"].any(dim=1).tolist()
    units = [[r for r in unit if trained[r]] for unit in batch.units()]
    group, prompt = batch["group_id"].tolist(), batch["prompt_length"].tolist()
    length = batch.lengths.tolist()

    def kind(unit: list[int]) -> tuple[bool, int]:
        return is_idle[unit[0]], group[unit[0]]

    lumps = []
    for (idle_now, _), members in groupby(sorted(filter(None, units), key=kind), key=kind):
        family: list[_Lump] = []
        for unit in members:
            whole = sum(length[row] for row in unit)
            added = whole - sum(prompt[row] for row in unit) if shares_prefixes else whole
            family.append(_Lump([unit], whole, added, idle_now))
        lumps.append(family)
    return [MicroBatch(b.rows, b.is_idle) for b in _even_blocks(lumps, rule)]


@dataclass(frozen=True)
class _Lump:
    """Units of one group: tokens by themselves, and added to others of the group before them."""

    units: list[list[int]]
    tokens: int
    added: int
    is_idle: bool

    @property
    def rows(self) -> list[int]:
        return [row for unit in self.units for row in unit]

    def with_next(self, lump: "_Lump") -> "_Lump":
        tokens, added = self.tokens + lump.added, self.added + lump.added
        return replace(self, units=self.units + lump.units, tokens=tokens, added=added)


@dataclass
class _Block:
    rows: list[int]
    tokens: int
    is_idle: bool


def _even_blocks(families: Sequence[Sequence[_Lump]], rule: MicroBatchRule) -> list[_Block]:
    """As few blocks as filling them one by one takes, of whole families if those fit."""
    best = _filled(families, rule)
    wholes: list[Sequence[_Lump]] = []
    for family in families:
        whole = reduce(_Lump.with_next, family)
        wholes.append([whole] if rule.has_room(whole.tokens, whole.rows) else family)
    blocks = _filled(wholes, rule)
    if len(blocks) > len(best):
        wholes, blocks = list(families), best
    if rule.max_tokens is None or len(blocks) == 1:
        return blocks
    low, high = 0, rule.max_tokens
    while high - low > max(1, _EVEN_TO * rule.max_tokens):
        middle = (low + high) // 2
        tighter = _filled(wholes, replace(rule, max_tokens=middle))
        if len(tighter) > len(blocks):
            low = middle
        else:
            high, blocks = middle, tighter
    return blocks


def _filled(families: Sequence[Sequence[_Lump]], rule: MicroBatchRule) -> list[_Block]:
    """Blocks of lumps in their order, each as full as ``rule`` lets it be."""
    blocks: list[_Block] = []
    for family in families:
        for number, lump in enumerate(family):
            last = blocks[-1] if blocks and blocks[-1].is_idle == lump.is_idle else None
            cost = lump.added if number else lump.tokens
            if last is not None and rule.has_room(last.tokens + cost, last.rows + lump.rows):
                last.rows += lump.rows
                last.tokens += cost
            else:
                blocks.append(_Block(lump.rows, lump.tokens, lump.is_idle))
    return blocks


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
    extreme = extreme_in(name)
    if extreme is not None:
        return extreme(value for value, _ in pairs)
    return sum(value * count for value, count in pairs) / sum(count for _, count in pairs)
