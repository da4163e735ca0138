"""What is read from and written to the tables of a buffer and of a set of tasks.

Each method is a part of a transaction: it takes the connection. When to do what is
`trinity.buffer.storage.sql`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, Table, func, insert, select, update

from trinity.common.experience import Experience
from trinity.common.schema.sql_schema import (
    WITHDRAWN,
    buffer_tables,
    experience_of_row,
    row_of_experience,
    task_table,
)

_CHUNK = 500  # parameters of one statement


class LostRowError(LookupError):
    """A row that the ledger knows is not in the table, or not an experience."""


@dataclass(frozen=True)
class Filters:
    """Which rows of a buffer are looked at; None is no condition."""

    reward_min: float | None = None
    reward_max: float | None = None
    model_version_min: int | None = None
    model_version_max: int | None = None
    task_id: str | None = None


class StoredExperience(NamedTuple):
    """A row of a buffer, and how often it was read."""

    id: int
    consumed: int
    experience: Experience


class ExperienceTables:
    """The three tables of the buffer ``name``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tables = buffer_tables(name)

    def insert(self, connection: Connection, experiences: Sequence[Experience]) -> list[int]:
        """Add experiences; their rows, in the same order."""
        rows, blobs, _ = self.tables
        ids = _inserted(connection, rows, [row_of_experience(e) for e in experiences])
        values = [
            {"id": row, "experience_bytes": e.serialize()}
            for row, e in zip(ids, experiences, strict=True)
        ]
        connection.execute(insert(blobs), values)
        return ids

    def load(self, connection: Connection, ids: Sequence[int]) -> list[Experience]:
        """The experiences of rows, in the order asked for.

        Raises:
            LostRowError: A row is not there, or holds no experience.
        """
        found: dict[int, Experience] = {}
        for chunk in _chunks(ids):
            statement = self._with_blobs().where(self.tables.rows.c.id.in_(chunk))
            for row in connection.execute(statement):
                found[row.id] = self._experience(row)
        missing = [row for row in ids if row not in found]
        if missing:
            raise LostRowError(f"The table {self.name!r} has lost row {missing[0]}: it was edited.")
        return [found[row] for row in ids]

    def query(
        self, connection: Connection, offset: int, limit: int, filters: Filters | None = None
    ) -> list[StoredExperience]:
        """Rows for people to look at, in the order of writing."""
        statement = self._filtered(self._with_blobs(), filters)
        statement = statement.order_by(self.tables.rows.c.id).offset(offset).limit(limit)
        return [
            StoredExperience(row.id, row.consumed, self._experience(row))
            for row in connection.execute(statement)
        ]

    def count(self, connection: Connection, filters: Filters | None = None) -> int:
        """How many rows `query` would find in all."""
        statement = self._filtered(select(func.count()).select_from(self.tables.rows), filters)
        return int(connection.scalar(statement) or 0)

    def unread(
        self,
        connection: Connection,
        limit: int,
        *,
        min_version: int = 0,
        is_replayed: bool = False,
        skips_locked: bool = False,
    ) -> list[int]:
        """Rows to be read next, the newest first; replayed: the least read first.

        Args:
            skips_locked: Leave out rows that another transaction is taking (not on SQLite, where
                transactions wait for each other).
        """
        rows = self.tables.rows
        statement = select(rows.c.id).limit(limit)
        if is_replayed:
            statement = statement.where(rows.c.consumed >= 0)
            statement = statement.order_by(rows.c.consumed, rows.c.id.desc())
        else:
            statement = statement.where(rows.c.consumed == 0).order_by(rows.c.id.desc())
        if min_version > 0:
            version = rows.c.model_version
            statement = statement.where(version.is_(None) | (version >= min_version))
        if skips_locked:
            statement = statement.with_for_update(skip_locked=True)
        return list(connection.scalars(statement))

    def num_unread(self, connection: Connection) -> int:
        """Rows that were never read."""
        rows = self.tables.rows
        statement = select(func.count()).select_from(rows).where(rows.c.consumed == 0)
        return int(connection.scalar(statement) or 0)

    def count_reads(self, connection: Connection, ids: Sequence[int], count: int) -> None:
        """Add ``count`` to the number of times rows were read."""
        rows = self.tables.rows
        for chunk in _chunks(ids):
            statement = update(rows).where(rows.c.id.in_(chunk), rows.c.consumed >= 0)
            connection.execute(statement.values(consumed=rows.c.consumed + count))

    def withdraw(self, connection: Connection, ids: Sequence[int]) -> None:
        """Mark rows as never to be read."""
        rows = self.tables.rows
        for chunk in _chunks(ids):
            statement = update(rows).where(rows.c.id.in_(chunk))
            connection.execute(statement.values(consumed=WITHDRAWN))

    def keep(self, connection: Connection, record: Mapping[str, Any]) -> None:
        """Add a record to the ledger."""
        values = {**record, "ids": json.dumps(list(record.get("ids", ())))}
        connection.execute(insert(self.tables.ledger), [values])

    def kept(self, connection: Connection, token: str) -> list[int] | None:
        """The rows of the record with this token; None if there is none."""
        ledger = self.tables.ledger
        found = connection.scalar(select(ledger.c.ids).where(ledger.c.token == token))
        return None if found is None else list(json.loads(found))

    def records(self, connection: Connection, run: str) -> list[dict[str, Any]]:
        """All records of a run, in order."""
        ledger = self.tables.ledger
        statement = select(ledger).where(ledger.c.run == run).order_by(ledger.c.seq)
        return [
            {**row, "ids": tuple(json.loads(row["ids"]))}
            for row in connection.execute(statement).mappings()
        ]

    def newest_number(self, connection: Connection, kind: str) -> int | None:
        """The number of the last record of a kind, whatever the run."""
        ledger = self.tables.ledger
        statement = select(ledger.c.number).where(ledger.c.kind == kind)
        return connection.scalar(statement.order_by(ledger.c.seq.desc()).limit(1))

    def balances(self, connection: Connection) -> dict[str, int]:
        """Writer -> times it has acquired more often than released."""
        ledger = self.tables.ledger
        statement = select(ledger.c.run, ledger.c.kind)
        statement = statement.where(ledger.c.kind.in_(("acquire", "release")))
        found: dict[str, int] = {}
        for run, kind in connection.execute(statement.order_by(ledger.c.seq)):
            found[run] = max(0, found.get(run, 0) + (1 if kind == "acquire" else -1))
        return found

    def _with_blobs(self) -> Select[Any]:
        rows, blobs, _ = self.tables
        return select(rows, blobs.c.experience_bytes).join(blobs, blobs.c.id == rows.c.id)

    def _filtered(self, statement: Select[Any], filters: Filters | None) -> Select[Any]:
        rows = self.tables.rows
        for name, value in vars(filters or Filters()).items():
            if value is None:
                continue
            column = rows.c[name.removesuffix("_min").removesuffix("_max")]
            above = name.endswith("_min")
            bound = column >= value if above else column <= value
            statement = statement.where(column == value if name == "task_id" else bound)
        return statement

    def _experience(self, row: Any) -> Experience:
        try:
            return experience_of_row(row, row.experience_bytes)
        except ValueError as error:
            raise LostRowError(
                f"Row {row.id} of the table {self.name!r} is no experience: {error}"
            ) from error


class TaskTable:
    """The table of the set of tasks ``name``."""

    def __init__(self, name: str) -> None:
        self.table = task_table(name)

    def ids(self, connection: Connection) -> list[int]:
        """All rows, in order."""
        return list(connection.scalars(select(self.table.c.id).order_by(self.table.c.id)))

    def between(self, connection: Connection, first: int, last: int) -> list[Any]:
        """The tasks of rows ``first`` to ``last``."""
        statement = select(self.table.c.raw_task).where(self.table.c.id.between(first, last))
        return list(connection.scalars(statement.order_by(self.table.c.id)))

    def count(self, connection: Connection) -> int:
        """How many rows there are."""
        return int(connection.scalar(select(func.count()).select_from(self.table)) or 0)

    def page(self, connection: Connection, offset: int, limit: int) -> list[tuple[int, Any]]:
        """Id and content of rows for people to look at, in order."""
        statement = select(self.table.c.id, self.table.c.raw_task).order_by(self.table.c.id)
        found = connection.execute(statement.offset(offset).limit(limit))
        return [(row.id, row.raw_task) for row in found]

    def append(self, connection: Connection, tasks: Sequence[Mapping[str, Any]]) -> None:
        """Add tasks."""
        connection.execute(insert(self.table), [{"raw_task": dict(task)} for task in tasks])


def _inserted(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Ids of new rows, in their order."""
    if connection.dialect.insert_returning:
        statement = insert(table).returning(table.c.id, sort_by_parameter_order=True)
        return list(connection.scalars(statement, rows))
    found = (connection.execute(insert(table), row).inserted_primary_key for row in rows)
    return [key[0] for key in found if key is not None]


def _chunks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), _CHUNK):
        yield ids[start : start + _CHUNK]
