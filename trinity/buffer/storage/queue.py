"""Experiences that wait in memory: back-pressure, deadlines, an end, and a ledger on disk.

The same class serves as a plain object within a process and as an actor between processes: the
methods with `_batch` carry bytes.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from secrets import token_hex
from typing import Any

from trinity.algorithm.sample_strategy.base import oldest_version
from trinity.buffer.storage.base import Storage, Write
from trinity.buffer.storage.journal import Event, Journal, Outcome, StorageError, outcome
from trinity.buffer.storage.order import FifoOrder, Item, Order, PriorityOrder, with_uses
from trinity.buffer.storage.priority import PRIORITY_FUNC, uses_of
from trinity.common.config.buffer import ReplayBufferConfig
from trinity.common.errors import DeadlineError
from trinity.common.experience import Experience, deserialize_many, serialize_many
from trinity.utils.log import get_logger
from trinity.utils.metrics import Metrics
from trinity.utils.words import counted

Clock = Callable[[], float]


class QueueStorage(Storage):
    """A queue of experiences. ``prepare`` -> (``load_state_dict``) -> put and get -> ``close``.

    Writers `acquire` and `release`; when the last one has released, the queue is closed: readers
    get what is left, then None. With a journal every write and read is on disk before the
    call returns, and `load_state_dict` brings back what was not read by then.

    Args:
        name: The buffer's name in the config.
        capacity: Experiences that may wait before writers do.
        journal: Where experiences and ledger are kept; None keeps them in memory only.
        replay: Reuse of experiences; None or disabled: each is read once.
        is_paced: Readers take no more than was written, as if nothing were read twice: with
            replay a trainer would go on for ever while the explorer waits its turn.
        clock: Seconds, for the cool-down of reused experiences.
    """

    def __init__(
        self,
        name: str,
        *,
        capacity: int = 10000,
        journal: Journal | None = None,
        replay: ReplayBufferConfig | None = None,
        is_paced: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self.name = name
        self._log = get_logger(f"queue_{name}")
        self._capacity = capacity
        self._journal = journal
        self._replay = replay if replay is not None and replay.enable else None
        self._is_paced = is_paced
        self._clock = clock
        self._run = token_hex(8)
        self._order = self._new_order()
        self._pool: list[tuple[int, Experience]] = []
        self._changed = asyncio.Condition()
        self._turn = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._opening = asyncio.Lock()
        self._num_users = 0
        self._num_writers = 0
        self._is_closed = False
        self._is_read = True
        self._flushed_until = -1
        self._writes = self._reads = self._next_id = 0
        self._counts = {"written": 0, "read": 0, "dropped": 0}
        self._num_restored = 0  # that may be read besides what is counted as written
        self._last_put = time.monotonic()

    def _new_order(self) -> Order:
        if self._replay is None:
            return FifoOrder(self._capacity)
        function = PRIORITY_FUNC.get(self._replay.priority_fn)
        return PriorityOrder(
            self._capacity,
            function(**self._replay.priority_fn_args),
            self._replay.reuse_cooldown_time,
        )

    async def prepare(self) -> None:
        """Open the journal, if none of two commands that share the queue has done so."""
        async with self._opening:
            self._log.info("Room for %d experiences.", self._capacity)
            if self._journal is not None and not self._num_users:
                await asyncio.to_thread(self._journal.open, self._run)
            self._num_users += 1

    async def acquire(self) -> int:
        """One more writer; returns how many there are."""
        async with self._changed:
            self._num_writers += 1
            self._is_closed = False
            return self._num_writers

    async def release(self) -> int:
        """One writer less; with the last the queue is closed."""
        async with self._changed:
            self._num_writers -= 1
            self._is_closed = self._num_writers <= 0
            if self._is_closed:
                self._log.info("The last writer is done: %s.", self._metrics())
            self._changed.notify_all()
            return self._num_writers

    async def put(self, experiences: Sequence[Experience]) -> Metrics:
        """Add a list of experiences, when there is room for it. They belong to the queue now.

        Raises:
            StorageError: The journal can't be written; nothing was added.
        """
        if not experiences:
            return self._metrics()
        async with self._turn:  # a reader may `rewind` while writers wait for room
            async with self._changed:
                await self._changed.wait_for(lambda: self._has_room(len(experiences)))
            async with self._writing:
                number = self._writes + 1
                ids = await self._append(number, experiences)
                async with self._changed:
                    self._writes = number
                    self._counts["written"] += len(experiences)
                    self._last_put = time.monotonic()
                    self._enter(Item(ids, list(experiences)))
                    self._changed.notify_all()
        return self._metrics()

    def _has_room(self, count: int) -> bool:
        return not self._is_read or self._order.has_room(count)

    async def stop_reading(self) -> None:
        async with self._changed:
            self._is_read = False
            self._changed.notify_all()

    async def _append(self, number: int, experiences: Sequence[Experience]) -> list[int]:
        if self._journal is None:
            first, self._next_id = self._next_id, self._next_id + len(experiences)
            return list(range(first, self._next_id))
        return await asyncio.to_thread(self._journal.append, number, experiences)

    async def flush(self, until: int | None = None) -> None:
        """No more is written before the weights of training step ``until`` are out.

        Reads for steps up to ``until`` don't wait for a full batch: they get what is there, even
        nothing. None takes this back.
        """
        async with self._changed:
            self._flushed_until = -1 if until is None else until
            self._changed.notify_all()

    async def get(
        self,
        batch_size: int,
        timeout_s: float,
        *,
        min_model_version: int = 0,
        step: int | None = None,
    ) -> list[Experience] | None:
        """The next ``batch_size`` experiences; None when the queue is closed and empty.

        Fewer come back when the queue is closed, after ``timeout_s`` seconds, and when writers wait
        for the weights of training step ``step`` (`flush`).

        Args:
            min_model_version: Experiences of older weights are dropped.
            step: Training step the batch is for.

        Raises:
            DeadlineError: Not a single one came in ``timeout_s`` seconds.
        """
        deadline = self._clock() + timeout_s
        async with self._changed:
            await self._until_written(batch_size, step, timeout_s)
            while not self._is_batch_ready(batch_size, min_model_version, step):
                if self._clock() >= deadline:
                    break
                await self._wait(deadline)
            batch = self._pool[:batch_size]
            if batch:
                self._note(Event("read", self._reads + 1, tuple(row for row, _ in batch)))
                self._pool = self._pool[batch_size:]
                self._reads += 1
                self._counts["read"] += len(batch)
            elif not self._is_final(step):
                raise self._nothing_came(timeout_s)
            is_end = not batch and self._is_closed
            return None if is_end else [experience for _, experience in batch]

    async def _until_written(self, batch_size: int, step: int | None, timeout_s: float) -> None:
        """Hold up a paced reader while it would have more than was written."""
        if not self._is_paced or self._replay is None:
            return

        def is_enough() -> bool:
            wanted = self._counts["read"] + batch_size
            written = self._counts["written"] + self._num_restored
            return wanted <= written or self._is_final(step)

        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait_for(is_enough)

    def _is_batch_ready(self, batch_size: int, min_version: int, step: int | None) -> bool:
        """Fill the pool as far as possible; True if no waiting would add to it."""
        self._pool = self._fresh(self._pool, min_version)
        self._drop(self._order.wake(self._clock()))
        while len(self._pool) < batch_size:
            item = self._order.get(self._clock())
            if item is None:
                return self._is_final(step)
            self._pool += self._fresh(
                list(zip(item.ids, item.experiences, strict=True)), min_version
            )
            self._changed.notify_all()  # there is room for a writer
        return True

    def _is_final(self, step: int | None) -> bool:
        return self._is_closed or (step is not None and step <= self._flushed_until)

    def _fresh(
        self, rows: list[tuple[int, Experience]], min_version: int
    ) -> list[tuple[int, Experience]]:
        stale = tuple(row for row, e in rows if _is_stale(e, min_version))
        if not stale:
            return rows
        self._counts["dropped"] += len(stale)
        self._note(Event("drop", self._reads + 1, stale, reason="stale"))
        return [(row, e) for row, e in rows if not _is_stale(e, min_version)]

    async def _wait(self, deadline: float) -> None:
        """Until something changes, the deadline passes or a reused item has cooled down."""
        ready = self._order.next_ready()
        until = deadline if ready is None else min(deadline, ready)
        try:
            async with asyncio.timeout(max(0.0, until - self._clock())):
                await self._changed.wait()
        except TimeoutError:
            return

    def _nothing_came(self, timeout_s: float) -> DeadlineError:
        seconds = time.monotonic() - self._last_put
        last = f"the last wrote {seconds:.0f} s ago" if self._writes else "nothing was written yet"
        return DeadlineError(
            f"experiences in the queue {self.name!r}",
            "a read",
            timeout_s,
            f"It has {counted(self._num_writers, 'writer')}; {last}. "
            "See the explorer's log, or raise max_read_timeout.",
        )

    def _enter(self, item: Item) -> None:
        self._drop(self._order.put(item))

    def _drop(self, items: Sequence[Item]) -> None:
        """Count and note what there is no room for."""
        for item in items:
            self._counts["dropped"] += len(item)
            self._log.debug("%d experiences dropped: no room.", len(item))
            self._note(Event("drop", self._reads, tuple(item.ids), reason="no room"))

    def _note(self, event: Event) -> None:
        """Not in a thread: a reader that is cancelled must not leave half a read behind."""
        if self._journal is not None:
            self._journal.note(event)

    async def size(self) -> int:
        """Experiences that wait."""
        return self._order.size + len(self._pool)

    def _metrics(self) -> Metrics:
        waiting = self._order.size + len(self._pool)
        return {"waiting": float(waiting), **{k: float(v) for k, v in self._counts.items()}}

    async def metrics(self) -> Metrics:
        """Experiences waiting now, and written, read and dropped so far."""
        return self._metrics()

    def state_dict(self) -> dict[str, Any]:
        """The position: which run's ledger, and how many of its writes and reads are done.

        Without a ledger on disk the experiences that wait are in it too, as bytes.
        """
        state, unread = self.snapshot()
        return state if unread is None else {**state, "unread": [write() for write in unread]}

    def snapshot(self) -> tuple[dict[str, Any], list[Write] | None]:
        state: dict[str, Any] = {"run": self._run, "writes": self._writes, "reads": self._reads}
        if self._journal is not None:
            return state, None
        return state, [partial(serialize_many, list(waiting)) for waiting in self._waiting()]

    def _waiting(self) -> list[list[Experience]]:
        """All that waits, in lists as it would be put again."""
        begun = [experience for _, experience in self._pool]
        return [exps for exps in (begun, *(i.experiences for i in self._order.items())) if exps]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a position; call it before anyone reads or writes.

        All writes above ``state["writes"]`` and all reads above ``state["reads"]`` are taken back;
        a number that is missing stays as the ledger has it. Experiences that were written and not
        read by then wait again, in their order.

        Raises:
            StorageError: The ledger of that run is not there, or shorter than the position.
        """
        self._run = state["run"]
        if self._journal is not None:
            self._recover(self._journal, state.get("writes"), state.get("reads"))
        else:
            self._restore(state)
        self._count_restored()

    def _count_restored(self) -> None:
        """Have paced readers get what waits unread, whoever wrote it and when."""
        unread = sum(not uses_of(e) for experiences in self._waiting() for e in experiences)
        self._num_restored = unread + self._counts["read"] - self._counts["written"]

    def _restore(self, state: Mapping[str, Any]) -> None:
        if "unread" not in state:
            raise StorageError(
                f"The queue {self.name!r} has no path, but had one when the checkpoint was saved: "
                "what was not read can't be found. Set the same path again."
            )
        self._writes, self._reads = int(state["writes"]), int(state["reads"])
        self._order, self._pool = self._new_order(), []
        for payload in state["unread"]:
            experiences = deserialize_many(payload)
            ids = range(self._next_id, self._next_id + len(experiences))
            self._next_id += len(experiences)
            self._enter(Item(list(ids), experiences))

    def read_position(self) -> dict[str, Any]:
        """The part of the position that belongs to who reads."""
        return {"run": self._run, "reads": self._reads}

    async def rewind(self, state: Mapping[str, Any]) -> None:
        """`load_state_dict`, for callers in other processes; nothing if it stands there already."""
        here = {"run": self._run, "writes": self._writes, "reads": self._reads}
        if all(here.get(key) == value for key, value in state.items()):
            return
        if self._journal is None and "unread" not in state:
            self._log.warning(
                "The queue %r has no path, so what was read after the checkpoint can't come back.",
                self.name,
            )
            return
        async with self._writing, self._changed:
            new = self._waiting() if state.get("run") != self._run else []
            self.load_state_dict(state)
            for experiences in new:  # written before the reader said whose queue this is
                ids = await self._append(self._writes + 1, experiences)
                self._writes += 1
                self._enter(Item(ids, experiences))
            self._count_restored()
            self._changed.notify_all()

    def _recover(self, journal: Journal, writes: int | None, reads: int | None) -> None:
        journal.open(self._run)
        known = outcome(journal.events())
        if known.writes < (writes or 0) or known.reads < (reads or 0):
            raise StorageError(
                f"The checkpoint knows {writes} writes and {reads} reads of the queue "
                f"{self.name!r}, but its ledger only {known.writes} and {known.reads}: it was "
                "moved or deleted. Restore it, or start under a new name."
            )
        journal.note(Event("rewind", writes=writes, reads=reads))
        found = outcome(journal.events())
        self._writes, self._reads = found.writes, found.reads
        self._order, self._pool = self._new_order(), []
        for _, ids in sorted(found.written.items()):
            self._put_back(journal, [row for row in ids if row not in found.dropped], found)

    def _put_back(self, journal: Journal, ids: list[int], found: Outcome) -> None:
        """Have rows wait again, but those that may not be read again."""
        rows = [row for row in ids if self._order.reuses or row not in found.uses]
        loaded = [
            with_uses(experience, found.uses[row]) if row in found.uses else experience
            for row, experience in zip(rows, journal.load(rows) if rows else (), strict=True)
        ]
        kept = [
            (row, experience)
            for row, experience in zip(rows, loaded, strict=True)
            if row not in found.uses or self._order.is_reusable([experience])
        ]
        if kept:
            self._enter(Item([row for row, _ in kept], [e for _, e in kept]))

    async def close(self) -> None:
        """End: close the journal, once nobody is left. Experiences that wait stay in it."""
        async with self._opening:
            self._num_users = max(0, self._num_users - 1)
            if self._journal is not None and not self._num_users:
                await asyncio.to_thread(self._journal.close)


def _is_stale(experience: Experience, min_version: int) -> bool:
    version = oldest_version(experience)
    return version is not None and version < min_version
