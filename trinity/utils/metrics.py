"""Numbers on their way to a monitor: prefixes and summaries over a batch."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import TypeVar

T = TypeVar("T")
Metrics = dict[str, float]

_SUFFIXES = ("mean", "sum", "max", "min", "last")


def prefix_metrics(metrics: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Each name under ``prefix/``."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def number(value: object) -> float | None:
    """``value`` as a float if it is a number: Python's, NumPy's or a tensor's; None if not."""
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, str | bytes) or getattr(value, "ndim", None) != 0:
        return None
    try:
        return float(value)  # type: ignore[arg-type]  # checked by trying
    except (TypeError, ValueError, RuntimeError):  # dates, objects, complex numbers
        return None


def numbers(found: Mapping[str, object]) -> Metrics:
    """What of ``found`` is a number, by its name."""
    named = {name: number(value) for name, value in found.items()}
    return {name: value for name, value in named.items() if value is not None}


def own_summary(name: str) -> tuple[str, str | None]:
    """A metric's name without its suffix, and what it says: ``tokens:sum`` -> tokens, sum."""
    base, _, suffix = name.rpartition(":")
    return (base, suffix) if base and suffix in _SUFFIXES else (name, None)


def extreme_in(name: str) -> Callable[[Iterable[float]], float] | None:
    """`max` or `min` for a metric with that word in its name; None for one that is averaged."""
    words = re.split(r"[_/]", name)
    return max if "max" in words else min if "min" in words else None


def joined(rows: Iterable[Mapping[str, float]]) -> Metrics:
    """One row of several: the mean of each name, or what its suffix says; names stay whole."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {
        name: _reduce(values, own_summary(name)[1] or "mean") for name, values in columns.items()
    }


def summarize(rows: Iterable[Mapping[str, object]], prefix: str = "") -> Metrics:
    """Mean, max and min over the rows for each numeric name: ``prefix/name/mean`` ...

    A name may choose one summary itself by a suffix: ``tokens:sum`` gives ``prefix/tokens``.
    Rows without a name, and values that are no numbers or not finite, don't count.
    """
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in numbers(row).items():
            if math.isfinite(value):
                columns.setdefault(name, []).append(value)
    lead = f"{prefix}/" if prefix else ""
    summary: Metrics = {}
    for name, values in columns.items():
        base, suffix = own_summary(name)
        if suffix is not None:
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
