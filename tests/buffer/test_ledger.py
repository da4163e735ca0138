"""Any interleaving of writers, readers, crashes and resumes leaves the ledger exact."""

import asyncio
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.buffer.samples import experience
from trinity.buffer.storage.journal import Event, JsonlJournal, outcome
from trinity.buffer.storage.queue import QueueStorage
from trinity.buffer.storage.sql import SQLStorage
from trinity.buffer.storage.sql_ledger import SQLJournal

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 4)),
        st.tuples(st.just("read"), st.integers(1, 5)),
        st.tuples(st.just("save"), st.just(0)),
        st.tuples(st.just("crash"), st.just(0)),
    ),
    max_size=25,
)


@dataclass
class Model:
    """What must hold: a trained-on list and the explorer's count, both put back by a crash."""

    trained: list[int] = field(default_factory=list)
    written: int = 0
    saved: tuple[list[int], int, dict[str, Any]] | None = None


def make(kind: str, folder: str) -> QueueStorage | SQLStorage:
    if kind == "sql":
        return SQLStorage("q", f"sqlite:///{folder}/q.db", owner="job")
    path = Path(folder) / "q"
    journal = JsonlJournal(f"{path}.jsonl") if kind == "jsonl" else SQLJournal(f"{path}.db", "q")
    return QueueStorage("q", journal=journal)


async def play(kind: str, folder: str, steps: list[tuple[str, int]]) -> None:
    model = Model()
    storage = make(kind, folder)
    await storage.prepare()
    model.saved = ([], 0, {**storage.state_dict()})
    for action, count in [*steps, ("save", 0), ("crash", 0)]:
        if action == "write":
            rows = [experience(model.written + i) for i in range(count)]
            await storage.put(rows)
            model.written += count
        elif action == "read" and model.written > len(model.trained):
            found = await storage.get(count, 0.0)
            model.trained += [int(e.eid.task) for e in found or []]
        elif action == "save":
            model.saved = ([*model.trained], model.written, storage.state_dict())
        elif action == "crash":
            await storage.close()
            trained, written, state = model.saved
            model.trained, model.written = [*trained], written
            storage = make(kind, folder)
            await storage.prepare()
            storage.load_state_dict(state)
    rest: list[int] = []
    while len(model.trained) + len(rest) < model.written:
        rest += [int(e.eid.task) for e in await storage.get(3, 0.0) or []]
    assert Counter(model.trained + rest) == Counter(range(model.written))
    assert await storage.size() == 0
    await storage.close()


@pytest.mark.parametrize("kind", ["jsonl", "sqlite", "sql"])
def test_nothing_is_lost_and_nothing_is_read_twice(kind: str):
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(STEPS)
    def run(steps: list[tuple[str, int]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(play(kind, folder, steps))

    run()


SHARED_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["w0", "w1", "r0", "r1"]),
        st.sampled_from(["work", "work", "work", "save", "crash"]),
        st.integers(1, 4),
    ),
    max_size=30,
)


@dataclass
class Process:
    """A process that shares a table with others, and what it did, call by call."""

    storage: SQLStorage
    calls: list[list[int]] = field(default_factory=list)
    num_saved: int = 0
    state: dict[str, Any] = field(default_factory=dict)


async def opened(name: str, folder: str) -> Process:
    storage = SQLStorage("q", f"sqlite:///{folder}/q.db", owner=name)
    await storage.prepare()
    return Process(storage, state=storage.state_dict())


async def crash(process: Process, name: str, folder: str) -> list[int]:
    """Start ``process`` again from what it saved; what it did after that."""
    await process.storage.close()
    process.storage = (await opened(name, folder)).storage
    process.storage.load_state_dict(process.state)
    undone = [label for call in process.calls[process.num_saved :] for label in call]
    del process.calls[process.num_saved :]
    return undone


async def play_shared(folder: str, steps: list[tuple[str, str, int]]) -> None:
    """Each label that stands is read once, by whoever, whichever processes are put back."""
    processes = {name: await opened(name, folder) for name in ("w0", "w1", "r0", "r1")}
    standing: set[int] = set()
    unread: set[int] = set()
    num_labels = 0
    for name, action, count in steps:
        process = processes[name]
        if action == "save":
            process.num_saved, process.state = len(process.calls), process.storage.state_dict()
        elif action == "crash":
            undone = set(await crash(process, name, folder))
            if name[0] == "w":
                standing -= undone
            unread = unread - undone if name[0] == "w" else unread | (undone & standing)
        elif name[0] == "w":
            labels = list(range(num_labels, num_labels + count))
            num_labels += count
            await process.storage.put([experience(label) for label in labels])
            process.calls.append(labels)
            standing |= set(labels)
            unread |= set(labels)
        elif unread:
            found = [int(e.eid.task) for e in await process.storage.get(count, 0.0) or []]
            assert set(found) <= unread
            process.calls.append(found)
            unread -= set(found)
        assert await process.storage.size() == len(unread)
    read = Counter(label for n in ("r0", "r1") for call in processes[n].calls for label in call)
    assert {label for label in read if label in standing} == standing - unread
    assert set(read.values()) <= {1}
    for process in processes.values():
        await process.storage.close()


def test_processes_that_share_a_table_are_put_back_one_by_one():
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(SHARED_STEPS)
    def run(steps: list[tuple[str, str, int]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(play_shared(folder, steps))

    run()


def test_a_rewind_takes_back_what_came_after_it_and_no_more():
    found = outcome(
        [
            Event("write", 1, (0, 1)),
            Event("read", 1, (0,)),
            Event("write", 2, (2,)),
            Event("read", 2, (1,)),
            Event("rewind", writes=1, reads=1),
            Event("write", 2, (3,)),
            Event("drop", 1, (3,), reason="stale"),
        ]
    )
    assert found.written == {1: (0, 1), 2: (3,)}
    assert found.uses == {0: 1}
    assert found.dropped == {3}
    assert (found.writes, found.reads) == (2, 1)
