"""Looking at rows before a run: which are bad, all of them at once, and leaving them out."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from rich.console import Console
from rich.progress import track

from trinity.buffer.rows.base import (
    BadRow,
    BadRowError,
    DataError,
    PickedRows,
    Row,
    Rows,
    iterate,
)
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
    found: Iterable[tuple[int, Row | BadRow]] = checked(rows, check, limit)
    if label is not None:
        total = len(rows) if limit is None else min(limit, len(rows))
        found = track(found, f"Loading {label}", total, console=Console(stderr=True))
    return {index: row for index, row in found if isinstance(row, BadRow)}


def checked(
    rows: Rows, check: Check, limit: int | None = None
) -> Iterator[tuple[int, Row | BadRow]]:
    """The first ``limit`` rows, each with its number; in place of a bad one, why it is bad."""
    for index, row in iterate(rows, limit):
        if not isinstance(row, BadRow):
            try:
                check(row)
            except RowFault as fault:
                row = BadRow(rows.where(index), fault.key, fault.reason)
        yield index, row


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

    Of a dotted column the first part must be there. Where no row can be read there are no columns
    to speak of: the rows themselves are what is wrong.
    """
    columns = set(rows.columns)
    if not columns:
        return
    for name, key in keys.items():
        if key not in columns and key.split(".")[0] not in columns:
            raise DataError(
                f"{key!r} is no column of {path!r}; it has: {', '.join(rows.columns)}.",
                key=f"format.{name}",
            )
