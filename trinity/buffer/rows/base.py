"""Raw rows of a data set, whatever file they lie in: the `Rows` protocol and what a bad row is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from trinity.common.errors import TrinityError

Row = dict[str, object]

_SHOWN = 20
_PAGE_ROWS = 1000


class DataError(TrinityError, ValueError):
    """A data set that cannot be used: missing, empty, of an unknown form, or with bad rows.

    ``key`` is the key of the data set's config section that is at fault.
    """

    exit_code = 2

    def __init__(self, message: str, key: str = "path") -> None:
        self.key = key
        super().__init__(message)

    def __reduce__(self) -> tuple[type["DataError"], tuple[object, ...]]:
        return type(self), (str(self), self.key)


@dataclass(frozen=True)
class BadRow:
    """Why a row cannot be used.

    Args:
        where: File and place in it, such as "train.jsonl, line 5".
        key: Column that is at fault; empty if it is the whole row.
        reason: What is wrong with it, as the end of a sentence.
    """

    where: str
    key: str
    reason: str

    def __str__(self) -> str:
        key = f", {self.key!r}" if self.key else ""
        return f"{self.where}{key}: {self.reason}"


class BadRowError(DataError):
    """Rows that cannot be used; ``bad_rows`` are all that were found."""

    def __init__(self, bad_rows: Sequence[BadRow]) -> None:
        self.bad_rows = list(bad_rows)
        shown = [f"  {bad}" for bad in self.bad_rows[:_SHOWN]]
        if len(self.bad_rows) > _SHOWN:
            shown.append(f"  ... and {len(self.bad_rows) - _SHOWN} more")
        count = len(self.bad_rows)
        noun = "row" if count == 1 else "rows"
        advice = "Mend them, or set on_bad_row: skip to leave such rows out."
        super().__init__("\n".join([f"{count} bad {noun}. {advice}", *shown]))

    def __reduce__(self) -> tuple[type["BadRowError"], tuple[object, ...]]:
        return type(self), (self.bad_rows,)


class Rows(Protocol):
    """Rows by number, read when asked for. Safe to hold when larger than memory."""

    @property
    def columns(self) -> list[str]:
        """Names of the columns; of rows that differ, those of the first rows."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """Row ``index``, from 0.

        Raises:
            BadRowError: It cannot be decoded.
        """
        ...

    def where(self, index: int) -> str:
        """Where row ``index`` stands, for a person: file and line or row."""
        ...


class ListRows:
    """Rows that are in memory."""

    def __init__(self, rows: Sequence[Row], name: str = "row") -> None:
        self._rows = rows
        self._name = name

    @property
    def columns(self) -> list[str]:
        return first_columns(self)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        if not isinstance(row, dict):
            raise BadRowError([BadRow(self.where(index), "", f"{_kind(row)}, not an object")])
        return row

    def where(self, index: int) -> str:
        return f"{self._name}, row {index + 1}"


class PickedRows:
    """Some rows of another set, in a given order."""

    def __init__(self, rows: Rows, indices: Sequence[int]) -> None:
        self._rows = rows
        self._indices = indices

    @property
    def columns(self) -> list[str]:
        return self._rows.columns

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Row:
        return self._rows[int(self._indices[index])]

    def where(self, index: int) -> str:
        return self._rows.where(int(self._indices[index]))


@runtime_checkable
class Paged(Protocol):
    """Rows that are read faster in pieces than one by one."""

    def page(self, start: int, stop: int) -> list[Row]:
        """Rows ``start`` to before ``stop``."""
        ...


def iterate(rows: Rows, limit: int | None = None) -> Iterator[tuple[int, Row | BadRow]]:
    """The first ``limit`` rows in order, each with its number; or why one can't be decoded."""
    size = len(rows) if limit is None else min(limit, len(rows))
    if isinstance(rows, Paged):
        for start in range(0, size, _PAGE_ROWS):
            yield from enumerate(rows.page(start, min(start + _PAGE_ROWS, size)), start)
        return
    for index in range(size):
        try:
            row: Row | BadRow = rows[index]
        except BadRowError as error:
            row = error.bad_rows[0]
        yield index, row


def first_columns(rows: Rows, count: int = 100) -> list[str]:
    """Names of the columns of the first rows that can be read, in order of appearance."""
    columns: dict[str, None] = {}
    for index in range(min(count, len(rows))):
        try:
            columns |= dict.fromkeys(rows[index])
        except BadRowError:
            continue
    return list(columns)


def lookup(row: Row, key: str) -> object:
    """The value of a column. A key that is no column may be dotted: ``reward_model.truth``.

    Raises:
        KeyError: There is no such value.
    """
    if key in row:
        return row[key]
    value: object = row
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise KeyError(key)
        value = value[part]
    return value


def _kind(value: object) -> str:
    return {list: "a list", str: "a text", type(None): "null", bool: "a bool"}.get(
        type(value), f"a {type(value).__name__}"
    )
