"""The tables of a buffer with their ledger, and the journal of a queue that is kept in them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from secrets import token_hex
from typing import TYPE_CHECKING

from trinity.buffer.storage.journal import Event, StorageError, outcome
from trinity.common.experience import Experience
from trinity.common.schema.database import Database
from trinity.common.schema.tables import ExperienceTables, LostRowError

if TYPE_CHECKING:
    from sqlalchemy import Connection


class Ledgered:
    """The tables of one buffer with their ledger, each method in a transaction of its own."""

    def __init__(self, database: Database, name: str) -> None:
        self.database = database
        self.tables = ExperienceTables(name)

    def open(self) -> None:
        self.database.open()
        self.database.create(*self.tables.tables)

    def append(self, run: str, number: int, experiences: Sequence[Experience]) -> list[int]:
        """Insert experiences together with their `write` event, once whatever breaks."""
        token = token_hex(16)

        def work(connection: "Connection") -> list[int]:
            ids = self.tables.insert(connection, experiences)
            self.keep(connection, run, Event("write", number, tuple(ids)), token)
            return ids

        return self.database.run(work, lambda connection: self.tables.kept(connection, token))

    def note(self, run: str, event: Event) -> None:
        """Keep an event, and in the rows what it means for them."""
        token = token_hex(16)

        def work(connection: "Connection") -> list[int]:
            if event.kind == "read":
                self.tables.count_reads(connection, event.ids, 1)
            self.keep(connection, run, event, token)
            return []

        self.database.run(work, lambda connection: self.tables.kept(connection, token))

    def events(self, run: str) -> list[Event]:
        """All events of a run, in order."""
        return self.database.read(lambda connection: self._events(connection, run))

    def load(self, ids: Sequence[int]) -> list[Experience]:
        """The experiences of rows, in the order asked for."""
        try:
            return self.database.read(lambda connection: self.tables.load(connection, ids))
        except LostRowError as error:
            raise StorageError(str(error)) from error

    def rewind(self, run: str, writes: int | None, reads: int | None) -> None:
        """Take back what the run did after a position, in the rows too."""

        def work(connection: "Connection") -> None:
            before = outcome(self._events(connection, run))
            self.keep(connection, run, Event("rewind", writes=writes, reads=reads), token_hex(16))
            after = outcome(self._events(connection, run))
            for count, rows in _undone(before.uses, after.uses).items():
                self.tables.count_reads(connection, rows, -count)
            gone = (ids for n, ids in before.written.items() if n not in after.written)
            self.tables.withdraw(connection, [row for ids in gone for row in ids])

        self.database.run(work)

    def keep(self, connection: "Connection", run: str, event: Event, token: str) -> None:
        """Add an event to the ledger; ``token`` tells it from all others."""
        self.tables.keep(connection, {"token": token, "run": run, **vars(event)})

    def _events(self, connection: "Connection", run: str) -> list[Event]:
        names = [field.name for field in fields(Event)]
        records = self.tables.records(connection, run)
        return [Event(**{name: record[name] for name in names}) for record in records]


def _undone(before: Mapping[int, int], after: Mapping[int, int]) -> dict[int, list[int]]:
    """Number of reads -> rows of which that many reads were taken back."""
    undone: dict[int, list[int]] = {}
    for row, uses in before.items():
        undone.setdefault(uses - after.get(row, 0), []).append(row)
    undone.pop(0, None)
    return undone


class SQLJournal:
    """The journal of a queue in a database, see `trinity.buffer.storage.journal`."""

    def __init__(
        self, path: str, name: str, *, max_retry_times: int = 3, retry_interval_s: float = 1.0
    ) -> None:
        database = Database(
            path, max_retry_times=max_retry_times, retry_interval_s=retry_interval_s
        )
        self._tables = Ledgered(database, name)
        self._run = ""

    def open(self, run: str) -> None:
        self._run = run
        self._tables.open()

    def append(self, number: int, experiences: Sequence[Experience]) -> list[int]:
        return self._tables.append(self._run, number, experiences)

    def note(self, event: Event) -> None:
        if event.kind == "rewind":
            self._tables.rewind(self._run, event.writes, event.reads)
        else:
            self._tables.note(self._run, event)

    def events(self) -> Iterator[Event]:
        return iter(self._tables.events(self._run))

    def load(self, ids: Sequence[int]) -> list[Experience]:
        return self._tables.load(ids)

    def close(self) -> None:
        self._tables.database.close()
