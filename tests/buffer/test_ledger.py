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
from trinity.buffer.storage.sql import SQLJournal, SQLStorage

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
