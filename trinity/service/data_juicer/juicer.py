"""Data-Juicer operators over plain rows. Runs where Data-Juicer is installed, and imports nothing
of trinity: the environment may be another one.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]

STATS = "stats"
_ID = "__row__"
_DJ_STATS, _DJ_META = "__dj__stats__", "__dj__meta__"
_FEW_ROWS = 1000  # below this, starting processes takes longer than the work


class Juicer:
    """A list of operators, loaded once.

    Args:
        process: Operators as in a recipe: ``[{"words_num_filter": {"min_num": 3}}, ...]``.
        num_process: Processes for large sets of rows.
    """

    def __init__(self, process: Sequence[Mapping[str, Mapping[str, Any] | None]], num_process: int):
        from data_juicer.ops import load_ops

        _check_names(process)
        self._num_process = num_process
        self._operators = load_ops([{k: dict(v or {}) for k, v in op.items()} for op in process])

    def run(self, rows: Sequence[Row]) -> tuple[list[Row], dict[str, float]]:
        """The rows that are left, with a column `STATS` of what the operators found out."""
        if not rows:
            return [], {}
        dataset, aside = _to_dataset(rows)
        counts: dict[str, float] = {}
        for operator in self._operators:
            before = len(dataset)
            operator.num_proc = 1 if len(dataset) < _FEW_ROWS else self._num_process
            dataset = dataset.process([operator], open_monitor=False)
            counts[f"dropped/{operator._name}"] = float(before - len(dataset))
            if not len(dataset):
                return [], counts
        return [_restored(row, aside) for row in dataset.to_list()], counts


def _check_names(process: Sequence[Mapping[str, Any]]) -> None:
    from difflib import get_close_matches

    from data_juicer.ops.base_op import OPERATORS

    for operator in process:
        for name in operator:
            if name not in OPERATORS.modules:
                close = get_close_matches(name, OPERATORS.modules, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"Data-Juicer has no operator {name!r}.{hint}")


def _to_dataset(rows: Sequence[Row]) -> tuple[Any, list[Row]]:
    """A data set, and for each row what it can't hold: columns whose values differ in type."""
    from data_juicer.core.data import NestedDataset

    columns = {name for row in rows for name in row}
    uneven = {name for name in columns if not _is_even([row.get(name) for row in rows])}
    flat = [
        {_ID: index, **{name: row.get(name) for name in sorted(columns - uneven)}}
        for index, row in enumerate(rows)
    ]
    aside = [{k: v for k, v in row.items() if k in uneven or v is None} for row in rows]
    return NestedDataset.from_list(flat), aside


def _is_even(values: Sequence[Any]) -> bool:
    """Whether a table column can hold the values without changing them."""
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return False
    if len(kinds) > 1 or not kinds <= {str, int, float, bool, list}:
        return False
    if kinds == {list}:
        items = {type(item) for value in values for item in value or ()}
        return len(items) == 1 and items <= {str, int, float, bool}
    return True


def _restored(row: Row, aside: Sequence[Row]) -> Row:
    index = row.pop(_ID)
    stats = {k: v for k, v in (row.pop(_DJ_STATS, None) or {}).items() if v is not None}
    found = row.pop(_DJ_META, None) or {}
    row = {name: value for name, value in row.items() if not name.startswith("__dj__")}
    return {**row, **aside[index], STATS: {**stats, **_plain(found)}}


def _plain(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {key: json.loads(json.dumps(value, default=str)) for key, value in meta.items()}
