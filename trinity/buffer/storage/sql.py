"""Experiences and tasks in a database: a queue's journal, a buffer that processes share, tasks.

The database is the only thing that processes share: each opens its own `SQLStorage`.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from secrets import token_hex
from typing import Any, ClassVar

import numpy as np
from sqlalchemy import Connection, Select, func, insert, select, update

from trinity.buffer.rows.base import BadRow, BadRowError, DataError, Row, first_columns
from trinity.buffer.storage.journal import Event, EventKind, StorageError, outcome
from trinity.common.config.buffer import ExperienceBufferConfig
from trinity.common.constants import ENV_MAX_EXPERIENCE_BYTES
from trinity.common.errors import DeadlineError
from trinity.common.experience import Experience, deserialize_many, serialize_many
from trinity.common.schema.database import Database
from trinity.common.schema.sql_schema import (
    WITHDRAWN,
    BufferTables,
    buffer_tables,
    experience_of_row,
    row_of_experience,
    task_table,
)
from trinity.utils.log import get_logger
from trinity.utils.metrics import Metrics

_CHUNK = 500  # parameters of one statement
_POLL_S = (0.02, 0.5)  # first and longest pause between two looks at the database
_GRACE_S = 60.0
_PAGE_ROWS = 200
_PAGES = 50
_DEFAULT_MAX_BYTES = 32 * 2**20


class SQLTables:
    """What is done with the tables of one buffer, each method in a transaction of its own."""

    def __init__(self, database: Database, name: str) -> None:
        self.database = database
        self.tables: BufferTables = buffer_tables(name)

    def open(self) -> None:
        self.database.open()
        self.database.create(*self.tables)

    def append(self, run: str, number: int, experiences: Sequence[Experience]) -> list[int]:
        """Insert experiences together with their `write` event, once whatever breaks."""
        rows = [row_of_experience(experience) for experience in experiences]
        blobs = [experience.serialize() for experience in experiences]
        token = token_hex(16)

        def work(connection: Connection) -> list[int]:
            statement = insert(self.tables.rows)
            ids = list(
                connection.scalars(
                    statement.returning(self.tables.rows.c.id, sort_by_parameter_order=True), rows
                )
            )
            values = [
                {"id": row, "experience_bytes": blob} for row, blob in zip(ids, blobs, strict=True)
            ]
            connection.execute(insert(self.tables.blobs), values)
            self.keep(connection, run, Event("write", number, tuple(ids)), token)
            return ids

        return self.database.run(work, lambda connection: self.kept(connection, token))

    def note(self, run: str, event: Event) -> None:
        """Keep an event, and in the rows what it means for them."""
        token = token_hex(16)

        def work(connection: Connection) -> list[int]:
            if event.kind == "read":
                self.count_reads(connection, event.ids, 1)
            self.keep(connection, run, event, token)
            return []

        self.database.run(work, lambda connection: self.kept(connection, token))

    def events(self, run: str) -> list[Event]:
        """All events of a run, in order."""
        return self.database.run(lambda connection: self._events(connection, run))

    def load(self, ids: Sequence[int]) -> list[Experience]:
        """The experiences of rows, in the order asked for."""
        return self.database.run(lambda connection: self.load_rows(connection, ids))

    def rewind(self, run: str, writes: int | None, reads: int | None) -> None:
        """Take back what the run did after a position, in the rows too."""

        def work(connection: Connection) -> None:
            before = outcome(self._events(connection, run))
            self.keep(connection, run, Event("rewind", writes=writes, reads=reads), token_hex(16))
            after = outcome(self._events(connection, run))
            undone: dict[int, list[int]] = {}
            for row, uses in before.uses.items():
                undone.setdefault(uses - after.uses.get(row, 0), []).append(row)
            for count, rows in undone.items():
                if count:
                    self.count_reads(connection, rows, -count)
            withdrawn = [
                row
                for number, ids in before.written.items()
                if number not in after.written
                for row in ids
            ]
            self._set_consumed(connection, withdrawn, WITHDRAWN)

        self.database.run(work)

    def count_reads(self, connection: Connection, ids: Sequence[int], count: int) -> None:
        """Add ``count`` to the number of times rows were read."""
        rows = self.tables.rows
        for chunk in _chunks(ids):
            statement = update(rows).where(rows.c.id.in_(chunk), rows.c.consumed >= 0)
            connection.execute(statement.values(consumed=rows.c.consumed + count))

    def _set_consumed(self, connection: Connection, ids: Sequence[int], value: int) -> None:
        rows = self.tables.rows
        for chunk in _chunks(ids):
            connection.execute(update(rows).where(rows.c.id.in_(chunk)).values(consumed=value))

    def load_rows(self, connection: Connection, ids: Sequence[int]) -> list[Experience]:
        rows, blobs = self.tables.rows, self.tables.blobs
        found: dict[int, Experience] = {}
        for chunk in _chunks(ids):
            statement = (
                select(rows, blobs.c.experience_bytes)
                .join(blobs, blobs.c.id == rows.c.id)
                .where(rows.c.id.in_(chunk))
            )
            for row in connection.execute(statement):
                found[row.id] = self._experience(row)
        missing = [row for row in ids if row not in found]
        if missing:
            raise StorageError(
                f"The table {rows.name!r} has lost row {missing[0]} of {len(ids)}: it was edited."
            )
        return [found[row] for row in ids]

    def _experience(self, row: Any) -> Experience:
        try:
            return experience_of_row(row, row.experience_bytes)
        except ValueError as error:
            raise StorageError(
                f"Row {row.id} of the table {self.tables.rows.name!r} is no experience: {error}"
            ) from error

    def keep(self, connection: Connection, run: str, event: Event, token: str) -> None:
        """Add an event to the ledger; ``token`` tells it from all others."""
        values = {
            "token": token,
            "run": run,
            "kind": event.kind,
            "number": event.number,
            "ids": json.dumps(event.ids),
            "writes": event.writes,
            "reads": event.reads,
            "reason": event.reason,
        }
        connection.execute(insert(self.tables.ledger), [values])

    def kept(self, connection: Connection, token: str) -> list[int] | None:
        """The rows of an event, if its transaction was committed although nobody heard of it."""
        ledger = self.tables.ledger
        found = connection.scalar(select(ledger.c.ids).where(ledger.c.token == token))
        return None if found is None else json.loads(found)

    def _events(self, connection: Connection, run: str) -> list[Event]:
        ledger = self.tables.ledger
        statement = select(ledger).where(ledger.c.run == run).order_by(ledger.c.seq)
        return [_event(row) for row in connection.execute(statement)]


class SQLJournal:
    """The journal of a queue in a database, see `trinity.buffer.storage.journal`."""

    def __init__(
        self, path: str, name: str, *, max_retry_times: int = 3, retry_interval_s: float = 1.0
    ) -> None:
        database = Database(
            path, max_retry_times=max_retry_times, retry_interval_s=retry_interval_s
        )
        self._tables = SQLTables(database, name)
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


class SQLStorage:
    """A buffer in a database that any number of processes write and read.

    It is used like `QueueStorage`. Each experience is read once (with ``is_replayed``: those read
    least often first), the newest first. Each object is a run of its own in the ledger, until
    `load_state_dict` makes it go on as an earlier one.

    Args:
        name: The buffer; also its table.
        path: Address of the database, or path of a SQLite file.
        is_replayed: Read experiences again when all were read.
        owner: Who this process is, the same after a restart (say, job and part). Without
            `load_state_dict`, all that its namesake has read then comes back: it was killed before
            its first checkpoint. None: nobody in particular.
        grace_s: Seconds to wait for a writer to come back, where all had done before we started.
    """

    is_local: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        path: str,
        *,
        is_replayed: bool = False,
        owner: str | None = None,
        max_retry_times: int = 3,
        retry_interval_s: float = 1.0,
        grace_s: float = _GRACE_S,
    ) -> None:
        self.name = name
        self._database = Database(
            path, max_retry_times=max_retry_times, retry_interval_s=retry_interval_s
        )
        self._tables = SQLTables(self._database, name)
        self._is_replayed = is_replayed
        self._owner = owner
        self._grace_s = grace_s
        self._run = self._writer = owner or token_hex(8)
        self._has_position = owner is None
        self._writes = self._reads = 0
        self._counts = {"written": 0, "read": 0, "too_large": 0}
        self._writing = asyncio.Lock()
        self._started_at = time.monotonic()
        self._had_done_before = False
        self._max_bytes = int(os.environ.get(ENV_MAX_EXPERIENCE_BYTES, _DEFAULT_MAX_BYTES))
        self._log = get_logger(f"sql_{name}")

    @classmethod
    def from_config(cls, config: ExperienceBufferConfig, owner: str | None = None) -> "SQLStorage":
        """The storage of a `sql` buffer."""
        if not config.path:
            raise StorageError(f"The buffer {config.name!r} has no path. Name its database.")
        return cls(
            config.name or "experience_buffer",
            config.path,
            is_replayed=config.replay_buffer.enable,
            owner=owner,
            max_retry_times=config.max_retry_times,
            retry_interval_s=config.max_retry_interval,
        )

    async def prepare(self) -> None:
        """Connect and create the tables."""
        await asyncio.to_thread(self._prepare)

    def _prepare(self) -> None:
        self._tables.open()
        if self._owner is not None:
            self._writes = outcome(self._tables.events(self._run)).writes
            for _ in range(self._database.run(self._balances).get(self._writer, 0)):
                self._tables.note(self._writer, Event("release", reason="killed"))
        self._had_done_before = self._database.run(self._have_all_done)
        self._started_at = time.monotonic()

    async def acquire(self) -> int:
        """One more writer; returns how many there are in all processes."""
        return await asyncio.to_thread(self._sign, "acquire")

    async def release(self) -> int:
        """One writer less; with the last the buffer is closed."""
        return await asyncio.to_thread(self._sign, "release")

    def _sign(self, kind: EventKind) -> int:
        self._tables.note(self._writer, Event(kind))
        return self._database.run(lambda connection: len(self._writers(connection)))

    async def flush(self, until: int | None = None) -> None:
        """No more is written before the weights of training step ``until`` are out."""
        event = Event("flush", -1 if until is None else until)
        await asyncio.to_thread(self._tables.note, self._writer, event)

    async def put(self, experiences: Sequence[Experience]) -> Metrics:
        """Add a list of experiences, all of it or nothing.

        Single experiences above TRINITY_MAX_EXP_SIZE bytes are left out, and counted.
        """
        kept = await asyncio.to_thread(self._within_size, experiences)
        if not kept:
            return await self.metrics()
        async with self._writing:
            number = self._writes + 1
            await asyncio.to_thread(self._tables.append, self._run, number, kept)
            self._writes = number
        self._counts["written"] += len(kept)
        return {key: float(value) for key, value in self._counts.items()}

    async def put_batch(self, payload: bytes) -> Metrics:
        """`put`, with the bytes of `serialize_many`."""
        return await self.put(deserialize_many(payload))

    def _within_size(self, experiences: Sequence[Experience]) -> list[Experience]:
        kept = [e for e in experiences if _num_bytes(e) <= self._max_bytes]
        if len(kept) < len(experiences):
            self._counts["too_large"] += len(experiences) - len(kept)
            self._log.warning(
                "%d experiences are larger than %d bytes and left out; raise %s to keep them.",
                len(experiences) - len(kept),
                self._max_bytes,
                ENV_MAX_EXPERIENCE_BYTES,
            )
        return kept

    async def get(
        self,
        batch_size: int,
        timeout_s: float,
        *,
        min_model_version: int = 0,
        step: int | None = None,
    ) -> list[Experience] | None:
        """The next ``batch_size`` experiences; None at the end. As `QueueStorage.get`."""
        if not self._has_position:
            await asyncio.to_thread(self.load_state_dict, {"run": self._run, "reads": 0})
        deadline = time.monotonic() + timeout_s
        pause_s = _POLL_S[0]
        while True:
            is_late = time.monotonic() >= deadline
            found, is_final, is_end = await self._take_whole(
                batch_size, min_model_version, step, is_late
            )
            if found is not None:
                return found
            if is_end:
                return None
            if is_final:
                return []
            if is_late:
                raise self._nothing_came(timeout_s)
            await asyncio.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, _POLL_S[1])

    async def get_batch(
        self,
        batch_size: int,
        timeout_s: float,
        min_model_version: int = 0,
        step: int | None = None,
    ) -> tuple[bytes | None, dict[str, Any]]:
        """`get`, with the experiences as bytes of `serialize_many`, and the reader's position."""
        found = await self.get(
            batch_size, timeout_s, min_model_version=min_model_version, step=step
        )
        return None if found is None else serialize_many(found), self.read_position()

    async def _take_whole(self, *arguments: Any) -> tuple[list[Experience] | None, bool, bool]:
        """`_take`; if it is cancelled meanwhile, what was taken is put back."""
        taking = asyncio.ensure_future(asyncio.to_thread(self._take, *arguments))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.wait([taking])
            if taking.exception() is None and taking.result()[0] is not None:
                self._reads -= 1
                await asyncio.to_thread(self._tables.rewind, self._run, None, self._reads)
            raise

    def _take(
        self, batch_size: int, min_version: int, step: int | None, is_late: bool
    ) -> tuple[list[Experience] | None, bool, bool]:
        """Rows taken, or None; whether nothing more is to be waited for; whether all is over."""
        token = token_hex(16)
        number = self._reads + 1

        def work(connection: Connection) -> tuple[list[int], bool, bool]:
            is_end = self._is_end(connection)
            is_final = is_end or self._is_flushed(connection, step)
            found = connection.scalars(self._unread(batch_size, min_version))
            ids: list[int] = list(found)
            if len(ids) < batch_size and not (is_final or is_late):
                return [], False, False
            if ids:
                self._tables.count_reads(connection, ids, 1)
                self._tables.keep(connection, self._run, Event("read", number, tuple(ids)), token)
            return ids, is_final, is_end

        def committed(connection: Connection) -> tuple[list[int], bool, bool] | None:
            ids = self._tables.kept(connection, token)
            return None if ids is None else (ids, False, False)

        ids, is_final, is_end = self._database.run(work, committed)
        if not ids:
            return None, is_final, is_end
        self._reads = number
        self._counts["read"] += len(ids)
        return self._tables.load(ids), is_final, is_end

    def _unread(self, batch_size: int, min_version: int) -> Select[Any]:
        rows = self._tables.tables.rows
        statement = select(rows.c.id).limit(batch_size)
        if self._is_replayed:
            statement = statement.where(rows.c.consumed >= 0)
            statement = statement.order_by(rows.c.consumed, rows.c.id.desc())
        else:
            statement = statement.where(rows.c.consumed == 0).order_by(rows.c.id.desc())
        if min_version > 0:
            version = rows.c.model_version
            statement = statement.where(version.is_(None) | (version >= min_version))
        return (
            statement if self._database.is_sqlite else statement.with_for_update(skip_locked=True)
        )

    def _writers(self, connection: Connection) -> list[str]:
        """Runs that take part as writers and have not released as often as they acquired."""
        return [run for run, balance in self._balances(connection).items() if balance > 0]

    def _balances(self, connection: Connection) -> dict[str, int]:
        ledger = self._tables.tables.ledger
        kinds = ("acquire", "release")
        statement = select(ledger.c.run, ledger.c.kind).where(ledger.c.kind.in_(kinds))
        balances: dict[str, int] = {}
        for run, kind in connection.execute(statement.order_by(ledger.c.seq)):
            step = 1 if kind == "acquire" else -1
            balances[run] = max(0, balances.get(run, 0) + step)
        return balances

    def _have_all_done(self, connection: Connection) -> bool:
        balances = self._balances(connection)
        return bool(balances) and not any(balances.values())

    def _is_end(self, connection: Connection) -> bool:
        if not self._have_all_done(connection):
            self._had_done_before = False
            return False
        waited_s = time.monotonic() - self._started_at
        return not self._had_done_before or waited_s >= self._grace_s

    def _is_flushed(self, connection: Connection, step: int | None) -> bool:
        if step is None:
            return False
        ledger = self._tables.tables.ledger
        statement = select(ledger.c.number).where(ledger.c.kind == "flush")
        newest = connection.scalar(statement.order_by(ledger.c.seq.desc()).limit(1))
        return newest is not None and step <= newest

    def _nothing_came(self, timeout_s: float) -> DeadlineError:
        writers = self._database.run(self._writers)
        return DeadlineError(
            f"experiences in the table {self.name!r}",
            "a read",
            timeout_s,
            f"It has {len(writers)} writer(s). See the explorer's log, or raise max_read_timeout.",
        )

    async def size(self) -> int:
        """Experiences that were not read yet."""
        rows = self._tables.tables.rows
        statement = select(func.count()).select_from(rows).where(rows.c.consumed == 0)
        found = await asyncio.to_thread(self._database.run, lambda c: c.scalar(statement))
        return int(found or 0)

    async def metrics(self) -> Metrics:
        """Experiences waiting now, and written and read by this object."""
        waiting = {"waiting": float(await self.size())}
        return waiting | {key: float(value) for key, value in self._counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """The position: which run of the ledger, and how many of its writes and reads are done."""
        return {"run": self._run, "writes": self._writes, "reads": self._reads}

    def read_position(self) -> dict[str, Any]:
        """The part of the position that belongs to who reads."""
        return {"run": self._run, "reads": self._reads}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a position of the same or an earlier run; what it did later is taken back."""
        self._tables.open()
        self._run, self._has_position = state["run"], True
        self._tables.rewind(self._run, state.get("writes"), state.get("reads"))
        known = outcome(self._tables.events(self._run))
        self._writes, self._reads = known.writes, int(state.get("reads", known.reads))

    async def position(self) -> dict[str, Any]:
        """`state_dict`, for callers in other processes."""
        return self.state_dict()

    async def rewind(self, state: Mapping[str, Any]) -> None:
        """`load_state_dict`, for callers in other processes; nothing if it stands there already."""
        here = self.state_dict()
        if any(here.get(key) != value for key, value in state.items()):
            await asyncio.to_thread(self.load_state_dict, state)

    async def close(self) -> None:
        await asyncio.to_thread(self._database.close)


class SQLTaskRows:
    """The rows of a table of tasks."""

    def __init__(self, path: str, name: str) -> None:
        self._name = name
        self._database = Database(path)
        self._table = task_table(name)
        self._database.open()
        if not self._database.has_table(name):
            tables = ", ".join(self._database.table_names()) or "none"
            raise DataError(f"{path!r} has no table {name!r}. Its tables: {tables}.", key="name")
        ids = select(self._table.c.id).order_by(self._table.c.id)
        self._ids = np.array(self._database.run(lambda c: list(c.scalars(ids))), dtype=np.int64)
        self._page = lru_cache(maxsize=_PAGES)(self._read_page)

    @property
    def columns(self) -> list[str]:
        return first_columns(self)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = self._page(index // _PAGE_ROWS)[index % _PAGE_ROWS]
        if not isinstance(row, dict):
            raise BadRowError([BadRow(self.where(index), "raw_task", "not an object")])
        return row

    def _read_page(self, number: int) -> list[object]:
        ids = self._ids[number * _PAGE_ROWS : (number + 1) * _PAGE_ROWS].tolist()
        table = self._table
        statement = select(table.c.raw_task).where(table.c.id.between(ids[0], ids[-1]))
        ordered = statement.order_by(table.c.id)
        return self._database.run(lambda connection: list(connection.scalars(ordered)))

    def where(self, index: int) -> str:
        return f"table {self._name}, id {self._ids[index]}"


def write_tasks(path: str, name: str, rows: Sequence[Row]) -> None:
    """Append rows to a table of tasks, all or none of them."""
    database = Database(path)
    database.open()
    table = task_table(name)
    database.create(table)
    values = [{"raw_task": row} for row in rows]
    database.run(lambda connection: connection.execute(insert(table), values) and None)
    database.close()


def _event(row: Any) -> Event:
    ids = tuple(json.loads(row.ids))
    return Event(row.kind, row.number, ids, row.writes, row.reads, row.reason)


def _chunks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), _CHUNK):
        yield ids[start : start + _CHUNK]


def _num_bytes(experience: Experience) -> int:
    """About the size of an experience in the table: its tensors."""
    tensors = [v for v in vars(experience).values() if hasattr(v, "nbytes")]
    media = (experience.multi_modal_inputs or {}).values()
    return sum(int(tensor.nbytes) for tensor in [*tensors, *media])
