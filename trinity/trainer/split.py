"""Which rows of a batch go to which rank."""

from collections.abc import Callable

from trinity.trainer.batch import TrainBatch


def split_rows(batch: TrainBatch, num_parts: int, balances: bool = True) -> list[list[int]]:
    """Rows of each part: whole groups, the largest first to whoever has the fewest tokens.

    Without ``balances`` groups go round in their order, about as many to each part.
    """
    group, length = batch["group_id"].tolist(), batch.lengths.tolist()
    prompt = batch["prompt_length"].tolist()
    trained = batch["action_mask"].any(dim=1).tolist()
    groups: dict[int, list[list[int]]] = {}
    for unit in batch.units():
        if any(trained[row] for row in unit):
            groups.setdefault(group[unit[0]], []).append(unit)

    def cost(units: list[list[int]]) -> int:
        rows = [row for unit in units for row in unit]
        return sum(length[row] - prompt[row] for row in rows) + max(prompt[row] for row in rows)

    if not balances:
        own: list[list[int]] = [[] for _ in range(num_parts)]
        for number, units in enumerate(groups.values()):
            own[number * num_parts // len(groups)] += [row for unit in units for row in unit]
        return [sorted(part) for part in own]
    bound = sum(cost(units) for units in groups.values()) / num_parts
    pieces = [piece for units in groups.values() for piece in _cut(units, cost, bound)]
    pieces.sort(key=cost, reverse=True)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    for piece in pieces:
        part = loads.index(min(loads))
        parts[part] += [row for unit in piece for row in unit]
        loads[part] += cost(piece)
    return [sorted(part) for part in parts]


def _cut(
    units: list[list[int]], cost: Callable[[list[list[int]]], int], bound: float
) -> list[list[list[int]]]:
    """A group in pieces of about ``bound`` tokens at most."""
    count = min(len(units), max(1, -(-int(cost(units)) // max(int(bound), 1))))
    size = -(-len(units) // count)
    return [units[start : start + size] for start in range(0, len(units), size)]
