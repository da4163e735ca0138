"""Looking at rows before a run: which are bad, all of them at once, and leaving them out."""

import logging
from collections.abc import Callable, Iterable, Mapping

from rich.console import Console
from rich.progress import track

from trinity.buffer.rows.base import BadRow, BadRowError, DataError, PickedRows, Row, Rows
from trinity.common.constants import OnBadRow

CHECKED_AT_START = 200_000
"""Rows that are looked at when a data set is opened; those after them when they are read."""

_log = logging.getLogger(__name__)


class RowFault(ValueError):
    """A row that a check refuses. ``key`` is the column at fault."""

    def __init__(self, key: str, reason: str) -> None:
        self.key, self.reason = key, reason
        super().__init__(f"{key!r}: {reason}")

    def __reduce__(self) -> tuple[type["RowFault"], tuple[str, str]]:
        return type(self), (self.key, self.reason)


Check = Callable[[Row], object]


def find_bad_rows(
    rows: Rows, check: Check, limit: int | None = None, label: str | None = None
) -> dict[int, BadRow]:
    """Row number -> why it is bad, for the first ``limit`` rows; ``check`` raises `RowFault`.

    Args:
        label: Shown beside a progress bar; None: there is none.
    """
    bad: dict[int, BadRow] = {}
    indices: Iterable[int] = range(len(rows) if limit is None else min(limit, len(rows)))
    if label is not None:
        indices = track(indices, f"Loading {label}", console=Console(stderr=True))
    for index in indices:
        found = bad_row(rows, index, check)
        if found is not None:
            bad[index] = found
    return bad


def bad_row(rows: Rows, index: int, check: Check) -> BadRow | None:
    """Why row ``index`` is bad, or None."""
    try:
        check(rows[index])
    except RowFault as fault:
        return BadRow(rows.where(index), fault.key, fault.reason)
    except BadRowError as error:
        return error.bad_rows[0]
    return None


def usable_rows(
    rows: Rows,
    check: Check,
    on_bad_row: OnBadRow,
    limit: int | None = CHECKED_AT_START,
    label: str | None = None,
) -> tuple[Rows, list[BadRow]]:
    """The rows without those that are bad, and why these are; ``label`` as for `find_bad_rows`.

    Raises:
        BadRowError: There are bad ones, and ``on_bad_row`` is `error`.
        DataError: No row is left.
    """
    bad = find_bad_rows(rows, check, limit, label)
    found = list(bad.values())
    if not bad:
        return rows, found
    if on_bad_row is OnBadRow.ERROR:
        raise BadRowError(found)
    if len(bad) == len(rows):
        raise DataError(f"All {len(rows)} rows are bad; the first: {found[0]}")
    _log.warning("%d of %d rows left out; the first: %s", len(bad), len(rows), found[0])
    return PickedRows(rows, [index for index in range(len(rows)) if index not in bad]), found


def refuse_missing_columns(rows: Rows, keys: Mapping[str, str], path: str) -> None:
    """`DataError` if one of the columns that ``keys`` names (config key -> column) is in no row.

    Of a dotted column the first part must be there.
    """
    columns = set(rows.columns)
    for name, key in keys.items():
        if key not in columns and key.split(".")[0] not in columns:
            raise DataError(
                f"{key!r} is no column of {path!r}; it has: {', '.join(rows.columns)}.",
                key=f"format.{name}",
            )
