"""Experiences in a database that processes share.

The database is the only thing that processes share: each opens its own `SQLStorage`.
"""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NamedTuple

from trinity.buffer.storage.base import Storage
from trinity.buffer.storage.journal import Event, EventKind, StorageError, outcome
from trinity.buffer.storage.sql_ledger import Ledgered
from trinity.common.config.buffer import ExperienceBufferConfig
from trinity.common.constants import ENV_MAX_EXPERIENCE_BYTES
from trinity.common.errors import DeadlineError
from trinity.common.experience import Experience
from trinity.common.schema.database import Database
from trinity.utils.log import get_logger
from trinity.utils.metrics import Metrics
from trinity.utils.words import counted

if TYPE_CHECKING:
    from sqlalchemy import Connection

_POLL_S = (0.02, 0.5)  # first and longest pause between two looks at the database
_GRACE_S = 60.0
_DEFAULT_MAX_BYTES = 32 * 2**20


class _Wanted(NamedTuple):
    """What a reader asks for; ``is_late``: it waits no longer, and takes what is there."""

    batch_size: int
    min_version: int
    step: int | None
    is_late: bool


class _Unread(NamedTuple):
    """Rows that may be taken, whether others are to be waited for, and whether all is over."""

    ids: list[int]
    is_final: bool
    is_end: bool


class SQLStorage(Storage):
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
        self._tables = Ledgered(self._database, name)
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
            balances = self._database.read(self._tables.tables.balances)
            for _ in range(balances.get(self._writer, 0)):
                self._tables.note(self._writer, Event("release", reason="killed"))
        self._had_done_before = self._database.read(self._have_all_done)
        self._started_at = time.monotonic()

    async def acquire(self) -> int:
        """One more writer; returns how many there are in all processes."""
        return await asyncio.to_thread(self._sign, "acquire")

    async def release(self) -> int:
        """One writer less; with the last the buffer is closed."""
        return await asyncio.to_thread(self._sign, "release")

    def _sign(self, kind: EventKind) -> int:
        self._tables.note(self._writer, Event(kind))
        return self._database.read(self._num_writers)

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

    async def stop_reading(self) -> None:
        """A database has room."""

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
            wanted = _Wanted(batch_size, min_model_version, step, is_late)
            found, state = await self._take_whole(wanted)
            if found is not None:
                return found
            if state.is_end:
                return None
            if state.is_final:
                return []
            if is_late:
                raise self._nothing_came(timeout_s)
            await asyncio.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, _POLL_S[1])

    async def _take_whole(self, wanted: _Wanted) -> tuple[list[Experience] | None, _Unread]:
        """`_take`; if it is cancelled meanwhile, what was taken is put back."""
        taking = asyncio.ensure_future(asyncio.to_thread(self._take, wanted))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.wait([taking])
            if taking.exception() is None and taking.result()[0] is not None:
                self._reads -= 1
                await asyncio.to_thread(self._tables.rewind, self._run, None, self._reads)
            raise

    def _take(self, wanted: _Wanted) -> tuple[list[Experience] | None, _Unread]:
        """Experiences taken, or None; and how the buffer was found."""
        token, number = token_hex(16), self._reads + 1

        def take(connection: "Connection") -> _Unread:
            found = self._unread(connection, wanted, is_taking=True)
            if found.ids:
                self._tables.tables.count_reads(connection, found.ids, 1)
                event = Event("read", number, tuple(found.ids))
                self._tables.keep(connection, self._run, event, token)
            return found

        def committed(connection: "Connection") -> _Unread | None:
            ids = self._tables.tables.kept(connection, token)
            return None if ids is None else _Unread(ids, is_final=False, is_end=False)

        found = self._database.read(lambda connection: self._unread(connection, wanted))
        if found.ids:
            found = self._database.run(take, committed)
        if not found.ids:
            return None, found
        self._reads = number
        self._counts["read"] += len(found.ids)
        return self._tables.load(found.ids), found

    def _unread(
        self, connection: "Connection", wanted: _Wanted, is_taking: bool = False
    ) -> _Unread:
        """Rows to take now: a whole batch, or what is there if no more is to be waited for."""
        is_end = self._is_end(connection)
        is_final = is_end or self._is_flushed(connection, wanted.step)
        ids = self._tables.tables.unread(
            connection,
            wanted.batch_size,
            min_version=wanted.min_version,
            is_replayed=self._is_replayed,
            skips_locked=is_taking and not self._database.is_sqlite,
        )
        is_enough = len(ids) == wanted.batch_size or is_final or wanted.is_late
        return _Unread(ids if is_enough else [], is_final, is_end)

    def _num_writers(self, connection: "Connection") -> int:
        balances = self._tables.tables.balances(connection)
        return sum(balance > 0 for balance in balances.values())

    def _have_all_done(self, connection: "Connection") -> bool:
        balances = self._tables.tables.balances(connection)
        return bool(balances) and not any(balances.values())

    def _is_end(self, connection: "Connection") -> bool:
        if not self._have_all_done(connection):
            self._had_done_before = False
            return False
        waited_s = time.monotonic() - self._started_at
        return not self._had_done_before or waited_s >= self._grace_s

    def _is_flushed(self, connection: "Connection", step: int | None) -> bool:
        if step is None:
            return False
        newest = self._tables.tables.newest_number(connection, "flush")
        return newest is not None and step <= newest

    def _nothing_came(self, timeout_s: float) -> DeadlineError:
        writers = self._database.read(self._num_writers)
        return DeadlineError(
            f"experiences in the table {self.name!r}",
            "a read",
            timeout_s,
            f"It has {counted(writers, 'writer')}. See the explorer's log, or raise "
            "max_read_timeout.",
        )

    async def size(self) -> int:
        """Experiences that were not read yet."""
        return await asyncio.to_thread(self._database.read, self._tables.tables.num_unread)

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

    async def rewind(self, state: Mapping[str, Any]) -> None:
        """`load_state_dict`, for callers in other processes; nothing if it stands there already."""
        here = self.state_dict()
        if any(here.get(key) != value for key, value in state.items()):
            await asyncio.to_thread(self.load_state_dict, state)

    async def close(self) -> None:
        await asyncio.to_thread(self._database.close)


def _num_bytes(experience: Experience) -> int:
    """About the size of an experience in the table: its tensors."""
    tensors = [v for v in vars(experience).values() if hasattr(v, "nbytes")]
    media = (experience.multi_modal_inputs or {}).values()
    return sum(int(tensor.nbytes) for tensor in [*tensors, *media])
