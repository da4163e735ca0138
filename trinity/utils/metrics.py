"""Numbers on their way to a monitor: prefixes and summaries over a batch."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TypeVar

T = TypeVar("T")
Metrics = dict[str, float]

_SUFFIXES = ("mean", "sum", "max", "min", "last")


def prefix_metrics(metrics: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Each name under ``prefix/``."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def summarize(rows: Iterable[Mapping[str, object]], prefix: str = "") -> Metrics:
    """Mean, max and min over the rows for each numeric name: ``prefix/name/mean`` ...

    A name may choose one summary itself by a suffix: ``tokens:sum`` gives ``prefix/tokens``.
    Rows without a name, and values that are no numbers or not finite, don't count.
    """
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, Real) and math.isfinite(value):
                columns.setdefault(name, []).append(float(value))
    lead = f"{prefix}/" if prefix else ""
    summary: Metrics = {}
    for name, values in columns.items():
        base, _, suffix = name.rpartition(":")
        if base and suffix in _SUFFIXES:
            summary[lead + base] = _reduce(values, suffix)
        else:
            summary |= {
                f"{lead}{name}/{how}": _reduce(values, how) for how in ("mean", "max", "min")
            }
    return summary


def _reduce(values: list[float], how: str) -> float:
    if how == "last":
        return values[-1]
    if how == "mean":
        return math.fsum(values) / len(values)
    if how == "sum":
        return math.fsum(values)
    return max(values) if how == "max" else min(values)
