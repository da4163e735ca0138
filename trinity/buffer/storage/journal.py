"""The ledger of a buffer: every write and read, on disk, so that a resume knows what was consumed.

A ledger belongs to a run. Its entries are events in the order they happened; `outcome` folds them
into what is still there. What lies in the file of an earlier run is left alone.
"""

import errno
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from trinity.buffer.rows.jsonl import JsonLines
from trinity.buffer.schema.experience import SavedExperienceFormatter, to_row
from trinity.common.errors import TrinityError
from trinity.common.experience import Experience

EventKind = Literal["write", "read", "drop", "rewind", "acquire", "release", "flush"]


class StorageError(TrinityError):
    """A buffer can't keep or find experiences: a full disk, a lost database, a foreign file."""


@dataclass(frozen=True)
class Event:
    """One entry.

    Args:
        kind: `write` and `read` as they say; `drop` for what will never be read (too old, no
            room); `rewind` takes back every write above ``writes`` and every read and drop above
            ``reads``, as a resume from an older checkpoint does; the others say who is writing.
        number: Counts the writes, or the reads, of the run from 1; of a drop, the last read.
        ids: Rows of the experiences.
    """

    kind: EventKind
    number: int = 0
    ids: tuple[int, ...] = ()
    writes: int | None = None
    reads: int | None = None
    reason: str = ""


@dataclass
class Outcome:
    """What a ledger comes to.

    Args:
        written: Write number -> rows, of the writes that stand.
        uses: Row -> times it was read.
        dropped: Rows that will never be read.
    """

    written: dict[int, tuple[int, ...]] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    writes: int = 0
    reads: int = 0


def outcome(events: Iterable[Event]) -> Outcome:
    """Fold events, in order, into what stands at their end."""
    writes: dict[int, tuple[int, ...]] = {}
    after: list[Event] = []  # reads and drops that stand
    for event in events:
        if event.kind == "write":
            writes[event.number] = event.ids
        elif event.kind == "rewind":
            if event.writes is not None:
                writes = {n: ids for n, ids in writes.items() if n <= event.writes}
            if event.reads is not None:
                limit = event.reads
                after = [e for e in after if e.number <= limit]
        elif event.kind in ("read", "drop"):
            after.append(event)
    found = Outcome(written=writes, writes=max(writes, default=0))
    for event in after:
        if event.kind == "drop":
            found.dropped |= set(event.ids)
            continue
        found.reads = max(found.reads, event.number)
        for row in event.ids:
            found.uses[row] = found.uses.get(row, 0) + 1
    return found


class Journal(Protocol):
    """Experiences and ledger on disk. Calls block, and may come from several threads."""

    def open(self, run: str) -> None:
        """Create what is missing and mend what a killed process left half written."""
        ...

    def append(self, number: int, experiences: Sequence[Experience]) -> list[int]:
        """Keep experiences and the `write` event together; returns their rows."""
        ...

    def note(self, event: Event) -> None:
        """Keep an event."""
        ...

    def events(self) -> Iterator[Event]:
        """All events of the run, in order."""
        ...

    def load(self, ids: Sequence[int]) -> list[Experience]:
        """The experiences of rows, in the order asked for."""
        ...

    def close(self) -> None: ...


class JsonlJournal:
    """A `.jsonl` file with an experience a line, and beside it `<file>.ledger` with the events.

    The row of an experience is its line, from 0.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.ledger_path = self.path.with_name(self.path.name + ".ledger")
        self._run = ""
        self._num_rows = 0
        self._rows: Appender | None = None
        self._ledger: Appender | None = None

    def open(self, run: str) -> None:
        self.close()
        self._run, self._lock = run, threading.RLock()  # not before: a lock does not travel
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rows, self._ledger = Appender(self.path), Appender(self.ledger_path)
        self._num_rows = len(JsonLines([self.path]))

    def append(self, number: int, experiences: Sequence[Experience]) -> list[int]:
        rows = [to_row(experience) for experience in experiences]
        with self._lock:
            assert self._rows is not None
            self._rows.append(rows)
            ids = range(self._num_rows, self._num_rows + len(rows))
            self._num_rows += len(rows)
            self.note(Event("write", number, tuple(ids)))
        return list(ids)

    def note(self, event: Event) -> None:
        record: dict[str, object] = {"run": self._run, "kind": event.kind, "number": event.number}
        record |= {"ids": list(event.ids), "writes": event.writes, "reads": event.reads}
        with self._lock:
            assert self._ledger is not None
            self._ledger.append([{**record, "reason": event.reason}])

    def events(self) -> Iterator[Event]:
        for row in _lines(self.ledger_path):
            if row.get("run") == self._run:
                yield _event(row)

    def load(self, ids: Sequence[int]) -> list[Experience]:
        rows, formatter = JsonLines([self.path]), SavedExperienceFormatter()
        try:
            return [formatter.format(rows[row]) for row in ids]
        finally:
            rows.close()

    def close(self) -> None:
        for appender in (self._rows, self._ledger):
            if appender is not None:
                appender.close()
        self._rows = self._ledger = None


def _lines(path: Path) -> Iterator[dict[str, object]]:
    rows = JsonLines([path])
    try:
        for index in range(len(rows)):
            yield rows[index]
    finally:
        rows.close()


def _event(row: Mapping[str, object]) -> Event:
    return Event(
        kind=row["kind"],  # type: ignore[arg-type]  # as written
        number=row["number"],  # type: ignore[arg-type]  # as written
        ids=tuple(row["ids"]),  # type: ignore[arg-type]  # as written
        writes=row["writes"],  # type: ignore[arg-type]  # as written
        reads=row["reads"],  # type: ignore[arg-type]  # as written
        reason=str(row["reason"]),
    )


class Appender:
    """Appends whole lines to a file: a write that fails half-way leaves nothing behind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._size = _cut_torn_line(path)

    def append(self, records: Sequence[Mapping[str, object]]) -> None:
        lines = [json.dumps(record, ensure_ascii=False, default=_plain) for record in records]
        data = "".join(f"{line}\n" for line in lines).encode()
        try:
            _write_all(self._file, data)
        except OSError as error:
            os.truncate(self._path, self._size)
            full = " The disk is full." if error.errno == errno.ENOSPC else ""
            raise StorageError(f"{self._path} can't be written: {error}.{full}") from error
        self._size += len(data)

    def close(self) -> None:
        self._file.close()


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _cut_torn_line(path: Path) -> int:
    """Cut off a last line without its newline, which a killed process left; the size after it."""
    size = path.stat().st_size
    with path.open("r+b") as stream:
        position = size
        while position:
            start = max(0, position - 2**16)
            stream.seek(start)
            end = stream.read(position - start).rfind(b"\n")
            if end >= 0:
                position = start + end + 1
                break
            position = start
        if position != size:
            stream.truncate(position)
    return position


def _plain(value: object) -> object:
    tolist = getattr(value, "tolist", None)
    return tolist() if tolist is not None else str(value)
