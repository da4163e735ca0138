import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.buffer.samples import experience, group, tasks_of
from trinity.buffer.reader.queue import QueueReader
from trinity.buffer.storage.journal import JsonlJournal, StorageError
from trinity.buffer.storage.priority import PRIORITY_FUNC
from trinity.buffer.storage.queue import QueueStorage
from trinity.buffer.storage.sql_ledger import SQLJournal
from trinity.buffer.writer.queue import QueueWriter
from trinity.common.config.buffer import ReplayBufferConfig
from trinity.common.errors import DeadlineError
from trinity.common.experience import deserialize_many, serialize_many


async def queue(tmp_path: Path | None = None, kind: str = "jsonl", **settings) -> QueueStorage:
    journal = None
    if tmp_path is not None and kind == "jsonl":
        journal = JsonlJournal(str(tmp_path / "q.jsonl"))
    elif tmp_path is not None:
        journal = SQLJournal(f"sqlite:///{tmp_path}/q.db", "q")
    storage = QueueStorage("q", journal=journal, **settings)
    await storage.prepare()
    return storage


async def test_batches_cross_the_lists_that_were_written():
    storage = await queue()
    await storage.put(group(3, batch=1))
    await storage.put(group(3, batch=2))
    assert tasks_of(await storage.get(4, 1)) == [0, 1, 2, 0]
    assert tasks_of(await storage.get(2, 1)) == [1, 2]


async def test_a_read_waits_for_a_full_batch():
    storage = await queue()
    await storage.put(group(3))
    reading = asyncio.create_task(storage.get(4, 60))
    await asyncio.sleep(0.02)
    assert not reading.done()
    await storage.put(group(3))
    assert len(await reading) == 4


async def test_timeout_returns_the_incomplete_batch_and_an_empty_one_is_an_error():
    storage = await queue()
    await storage.acquire()
    with pytest.raises(DeadlineError, match=r"1 writer; nothing was written yet"):
        await storage.get(8, 0.05)
    await storage.put(group(3))
    assert tasks_of(await storage.get(8, 0.05)) == [0, 1, 2]
    with pytest.raises(DeadlineError, match=r"queue 'q'.*1 writer; the last wrote"):
        await storage.get(8, 0.05)


async def test_the_last_writer_closes_and_leftovers_come_before_the_end():
    storage = await queue()
    await storage.acquire()
    await storage.acquire()
    await storage.put(group(5))
    assert await storage.release() == 1
    assert await storage.release() == 0
    reader = QueueReader(storage, timeout_s=1)
    assert len(await reader.read(4)) == 4
    assert len(await reader.read(4)) == 1
    with pytest.raises(StopAsyncIteration):
        await reader.read(4)


async def test_a_waiting_reader_ends_when_the_queue_closes():
    storage = await queue()
    await storage.acquire()
    reading = asyncio.create_task(storage.get(4, 60))
    await asyncio.sleep(0.02)
    await storage.release()
    assert await reading is None


async def test_a_cancelled_read_takes_nothing():
    storage = await queue()
    await storage.put(group(3))
    reading = asyncio.create_task(storage.get(4, 60))
    await asyncio.sleep(0.02)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await storage.put(group(1))
    assert len(await storage.get(4, 1)) == 4
    assert storage.state_dict()["reads"] == 1


async def test_writers_wait_for_room_and_a_large_list_enters_an_empty_queue():
    storage = await queue(capacity=4)
    await storage.put(group(6))
    writing = asyncio.create_task(storage.put(group(1, batch=2)))
    await asyncio.sleep(0.02)
    assert not writing.done()
    assert len(await storage.get(6, 1)) == 6
    await asyncio.wait_for(writing, 60)
    assert await storage.size() == 1


async def test_a_batch_larger_than_the_capacity_does_not_deadlock():
    storage = await queue(capacity=2)

    async def write() -> None:
        for batch in range(5):
            await storage.put(group(2, batch=batch))

    writing = asyncio.create_task(write())
    assert len(await storage.get(10, 60)) == 10
    await writing


async def test_flush_lets_only_the_steps_that_writers_wait_for_go_on():
    storage = await queue()
    await storage.acquire()
    await storage.put(group(3))
    await storage.flush(2)
    assert len(await storage.get(4, 5, step=1)) == 3
    assert await storage.get(4, 5, step=2) == []
    reading = asyncio.create_task(storage.get(2, 60, step=3))
    await asyncio.sleep(0.02)
    assert not reading.done()
    await storage.put(group(2))
    assert len(await reading) == 2


async def test_old_experiences_are_dropped_and_counted():
    storage = await queue()
    await storage.put([experience(v, version=v) for v in range(5)])
    await storage.put([experience("unknown", version=None)])
    assert tasks_of(await storage.get(3, 1, min_model_version=3)) == [3, 4, "unknown"]
    assert (await storage.metrics())["dropped"] == 3


async def test_bytes_cross_where_objects_do():
    storage = await queue()
    await storage.put_batch(serialize_many(group(2)))
    payload, position = await storage.get_batch(2, 1)
    assert tasks_of(deserialize_many(payload)) == [0, 1]
    assert position["reads"] == 1


@pytest.mark.parametrize("kind", ["jsonl", "sqlite"])
async def test_a_resume_brings_back_what_was_not_read(tmp_path: Path, kind: str):
    first = await queue(tmp_path, kind)
    await first.put(group(3, batch=1))
    await first.put(group(3, batch=2))
    await first.get(2, 1)
    state = first.state_dict()
    await first.get(2, 1)
    await first.put(group(1, batch=3))  # after the checkpoint; then the process is killed

    again = await queue(tmp_path, kind)
    again.load_state_dict(state)
    assert again.state_dict() == state
    found = await again.get(4, 1)
    assert [(e.eid.batch, e.eid.task) for e in found] == [(1, 2), (2, 0), (2, 1), (2, 2)]
    assert await again.size() == 0


@pytest.mark.parametrize("kind", ["jsonl", "sqlite"])
async def test_a_reader_alone_goes_back_and_keeps_all_writes(tmp_path: Path, kind: str):
    storage = await queue(tmp_path, kind)
    reader = QueueReader(storage, timeout_s=0.1)
    await storage.put(group(2, batch=1))
    await reader.read(1)
    state = reader.state_dict()
    await reader.read(1)
    await storage.put(group(2, batch=2))
    later = QueueReader(storage, timeout_s=0.1)
    later.load_state_dict(state)
    assert tasks_of(await later.read(3)) == [1, 0, 1]


async def test_what_a_new_explorer_wrote_stays_when_the_trainer_resumes(tmp_path: Path):
    first = await queue(tmp_path)
    await first.put(group(2, batch="old"))
    state = {"run": first.state_dict()["run"], "reads": 0}
    again = await queue(tmp_path)  # both processes were restarted
    await again.put(group(1, batch="new"))
    reader = QueueReader(again, timeout_s=0.1)
    reader.load_state_dict(state)
    assert [e.eid.batch for e in await reader.read(4)] == ["old", "old", "new"]


async def test_a_trainer_resumes_on_a_queue_without_a_path():
    storage = await queue()
    await storage.put(group(2))
    reader = QueueReader(storage, timeout_s=0.1)
    reader.load_state_dict({"run": "another", "reads": 7})
    assert tasks_of(await reader.read(2)) == [0, 1]


@pytest.mark.parametrize("kind", ["", "jsonl"])
async def test_a_trainer_resumes_while_an_explorer_waits_for_room(tmp_path: Path, kind: str):
    settings = {"tmp_path": tmp_path, "kind": kind} if kind else {}
    old = await queue(**settings)
    await old.put([experience(7)])
    position = old.read_position() if kind else old.state_dict()
    await old.close()
    new = await queue(capacity=1, **settings)
    await new.put([experience(8)])
    writing = asyncio.create_task(new.put([experience(9)]))
    await asyncio.wait({writing}, timeout=0.05)
    await asyncio.wait_for(new.rewind(position), 60)
    assert tasks_of(await new.get(2, 60)) == [7, 8]
    await asyncio.wait_for(writing, 60)
    assert tasks_of(await new.get(1, 60)) == [9]


async def test_without_a_path_the_state_holds_what_waits():
    first = await queue()
    await first.put(group(3))
    await first.get(1, 1)
    again = await queue()
    again.load_state_dict(first.state_dict())
    assert tasks_of(await again.get(2, 1)) == [1, 2]
    assert again.state_dict()["writes"] == 1


async def test_a_second_run_in_the_same_file_sees_nothing_of_the_first(tmp_path: Path):
    first = await queue(tmp_path)
    await first.put(group(3))
    assert await (await queue(tmp_path)).size() == 0


async def test_a_torn_line_of_a_killed_process_is_cut_off(tmp_path: Path):
    first = await queue(tmp_path)
    await first.put(group(2))
    state = first.state_dict()
    for name in ("q.jsonl", "q.jsonl.ledger"):
        with (tmp_path / name).open("a") as file:
            file.write('{"half a li')
    again = await queue(tmp_path)
    again.load_state_dict(state)
    await again.put(group(1, batch=2))
    assert tasks_of(await again.get(3, 1)) == [0, 1, 0]


async def test_a_lost_ledger_is_an_error_and_not_an_empty_queue(tmp_path: Path):
    first = await queue(tmp_path)
    await first.put(group(2))
    state = first.state_dict()
    (tmp_path / "q.jsonl.ledger").unlink()
    with pytest.raises(StorageError, match="Restore it"):
        (await queue(tmp_path)).load_state_dict(state)


async def test_what_was_read_has_the_texts_and_tensors_that_were_written(tmp_path: Path):
    first = await queue(tmp_path)
    await first.put([experience(7, reward=0.25, metrics={"accuracy": 1.0})])
    state = first.state_dict()
    again = await queue(tmp_path)
    again.load_state_dict(state)
    [found] = await again.get(1, 1)
    assert (found.reward, found.metrics, found.response_text) == (
        0.25,
        {"accuracy": 1.0},
        "answer 7",
    )
    assert found.logprobs.tolist() == [-0.5] * 4


def replaying(cooldown: float | None, **arguments) -> ReplayBufferConfig:
    return ReplayBufferConfig(
        enable=True, reuse_cooldown_time=cooldown, priority_fn_args=arguments or {"decay": 2.0}
    )


def clock() -> tuple[Callable[[], float], list[float]]:
    now = [0.0]
    return lambda: now[0], now


async def test_replay_gives_the_newest_first_and_the_used_ones_later():
    time, now = clock()
    storage = await queue(replay=replaying(10.0, decay=2.0), clock=time)
    for version in range(3):
        await storage.put([experience(version, version=version)])
    assert tasks_of(await storage.get(3, 1)) == [2, 1, 0]
    now[0] = 11.0
    await storage.put([experience("new", version=1)])
    found = await storage.get(4, 1)  # priorities 1, 2-2, 1-2, 0-2
    assert tasks_of(found) == ["new", 2, 1, 0]
    assert [e.info["use_count"] for e in found] == [1, 2, 2, 2]


@given(st.integers(0, 50), st.integers(0, 9), st.floats(0, 5), st.integers(-1, 4), st.floats(0, 2))
def test_priorities_are_the_formulas(
    version: int, uses: int, decay: float, limit: int, sigma: float
):
    item = [experience(0, version=version, info={"use_count": uses}), experience(1, version=99)]
    plain = PRIORITY_FUNC.get("linear_decay")(decay)  # type: ignore[call-arg]
    assert plain(item) == (version - decay * uses, True)
    noise = np.random.default_rng(7)
    names = ("linear_decay_use_count_control_randomization", "decay_limit_randomization")
    kinds = [PRIORITY_FUNC.get(name) for name in names]
    limited = kinds[0](decay, limit, sigma, seed=7)  # type: ignore[call-arg]
    for _ in range(3):
        priority, is_reusable = limited(item)
        expected = version - decay * uses + (sigma * noise.standard_normal() if sigma else 0)
        assert priority == expected
        assert is_reusable == (limit <= 0 or uses < limit)
    assert kinds[0] is kinds[1]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=20), st.floats(0.1, 3))
@settings(max_examples=50, deadline=None)
def test_replay_gives_the_highest_priority_and_the_oldest_of_equals(
    steps: list[tuple[int, bool]], decay: float
):
    """Against a plain list: every item cools down at once."""

    async def play() -> None:
        storage = await queue(replay=replaying(0.0, decay=decay), clock=lambda: 0.0)
        waiting: list[tuple[int, int, int]] = []  # label, version, uses; the oldest first
        used: list[tuple[int, int, int]] = []  # comes back with the next read
        for label, (version, is_read) in enumerate(steps):
            await storage.put([experience(label, version=version)])
            waiting.append((label, version, 0))
            if is_read:
                waiting, used = waiting + used, []
                best = max(waiting, key=lambda item: item[1] - decay * item[2])
                assert tasks_of(await storage.get(1, 0.0)) == [best[0]]
                waiting.remove(best)
                used = [(*best[:2], best[2] + 1)]

    asyncio.run(play())


async def test_a_paced_reader_waits_for_new_experiences_though_old_ones_may_be_read_again():
    storage = await queue(replay=replaying(0.0), is_paced=True)
    await storage.acquire()
    await storage.put(group(4, batch=1))
    assert len(await storage.get(4, 60, step=1)) == 4
    reading = asyncio.create_task(storage.get(4, 60, step=2))
    await asyncio.sleep(0.05)
    assert not reading.done()
    await storage.put(group(4, batch=2))
    assert {e.eid.batch for e in await reading} == {2}
    await storage.flush(3)  # the explorer waits for the weights of step 3
    assert len(await storage.get(4, 60, step=3)) == 4
    assert len(await storage.get(4, 0.05, step=4)) == 4  # too late for more than there is
    await storage.release()
    assert len(await storage.get(4, 60, step=5)) == 4


@pytest.mark.parametrize("is_replayed", [True, False])
async def test_a_paced_reader_gets_what_a_checkpoint_had_unread(is_replayed: bool):
    """An explorer that runs a step ahead has written it before."""
    replay = replaying(0.0) if is_replayed else None
    before = await queue(replay=replay, is_paced=True)
    await before.put(group(4, batch=1))
    await before.get(4, 60, step=1)
    await before.put(group(4, batch=2))
    after = await queue(replay=replay, is_paced=True)
    after.load_state_dict(before.state_dict())
    await after.acquire()
    assert {e.eid.batch for e in await asyncio.wait_for(after.get(4, 600, step=2), 60)} == {2}
    reading = asyncio.create_task(after.get(4, 600, step=3))
    await asyncio.sleep(0.05)
    assert not reading.done()
    await after.put(group(4, batch=3))
    assert {e.eid.batch for e in await asyncio.wait_for(reading, 60)} == {3}


@pytest.mark.parametrize("cooldown_s", [0.0, 0.05])
async def test_a_reader_without_a_pace_waits_no_longer_than_the_cool_down(cooldown_s: float):
    storage = await queue(replay=replaying(cooldown_s))
    await storage.put(group(4))
    for _ in range(2):
        assert len(await asyncio.wait_for(storage.get(4, 600), 60) or []) == 4


@pytest.mark.parametrize("is_other_run", [True, False])
async def test_a_paced_reader_that_goes_back_gets_each_unread_one_once(
    tmp_path: Path, is_other_run: bool
):
    """A trainer's command that is started anew, on the queue of an explorer that goes on."""
    settings = {"replay": replaying(0.0), "is_paced": True}
    storage = await queue(tmp_path, **settings)
    await storage.acquire()
    await storage.put(group(4, batch=1))
    await storage.get(4, 60, step=1)
    then = storage.read_position()
    for batch in (2, 3):
        await storage.put(group(4, batch=batch))
    await storage.get(4, 60, step=2)
    if is_other_run:  # the explorer's is new as well, and has written before the trainer came
        storage = await queue(tmp_path, **settings)
        await storage.acquire()
        await storage.put(group(4, batch=4))
    await storage.rewind(then)
    unread = [2, 3, 4] if is_other_run else [2, 3]
    found = [await storage.get(4, 60, step=step) for step in range(2, 2 + len(unread))]
    assert sorted(e.eid.batch for batch in found for e in batch) == sorted(unread * 4)
    reading = asyncio.create_task(storage.get(4, 600, step=9))
    await storage.put(group(4, batch=9))
    assert {e.eid.batch for e in await asyncio.wait_for(reading, 60)} == {9}


@pytest.mark.parametrize("kind", ["jsonl", "sql"])
async def test_a_command_that_ends_leaves_the_queue_to_the_other_one(kind: str, tmp_path: Path):
    """Explorer and trainer of two commands each prepare it, and close it at their own end."""
    storage = await queue(tmp_path, kind)
    await storage.acquire()
    await storage.prepare()
    await storage.put(group(4, batch=1))
    await storage.release()
    await storage.close()
    assert len(await storage.get(3, 60) or []) == 3
    assert len(await storage.get(3, 60) or []) == 1
    assert await storage.get(3, 60) is None
    await storage.close()
    await storage.prepare()
    await storage.put(group(4, batch=2))
    await storage.close()


async def test_replay_without_a_cooldown_reads_once():
    storage = await queue(replay=replaying(None))
    await storage.put(group(2))
    await storage.get(2, 1)
    with pytest.raises(DeadlineError):
        await storage.get(1, 0.02)


async def test_a_full_replay_buffer_drops_the_lowest_priority():
    storage = await queue(capacity=2, replay=replaying(None))
    for version in (5, 3, 4, 1):
        await storage.put([experience(version, version=version)])
    assert tasks_of(await storage.get(2, 1)) == [5, 4]
    assert (await storage.metrics())["dropped"] == 2


async def test_what_a_used_one_pushes_out_is_counted_and_stays_out(tmp_path: Path):
    time, now = clock()
    storage = await queue(tmp_path, capacity=2, replay=replaying(1.0, decay=0.0), clock=time)
    for version in (9, 1, 2):
        await storage.put([experience(version, version=version)])
        await storage.get(1, 1) if version == 9 else None
    now[0] = 2.0
    assert tasks_of(await storage.get(1, 1)) == [9]  # it is back, in place of the lowest
    assert (await storage.metrics())["dropped"] == 1
    again = await queue(tmp_path, capacity=9, replay=replaying(1.0, decay=0.0), clock=time)
    again.load_state_dict(storage.state_dict())
    assert sorted(tasks_of(await again.get(9, 0.0))) == [2, 9]


async def test_the_trainer_cannot_change_what_is_replayed():
    time, now = clock()
    storage = await queue(replay=replaying(1.0), clock=time)
    await storage.put(group(1))
    [first] = await storage.get(1, 1)
    first.info["is_expert"] = True
    now[0] = 2.0
    [second] = await storage.get(1, 1)
    assert "is_expert" not in second.info


async def test_a_resumed_replay_buffer_knows_its_use_counts(tmp_path: Path):
    time, _ = clock()
    first = await queue(tmp_path, replay=replaying(5.0), clock=time)
    await first.put(group(1, version=4))
    await first.get(1, 1)
    state = first.state_dict()
    again = await queue(tmp_path, replay=replaying(5.0), clock=time)
    again.load_state_dict(state)
    [found] = await again.get(1, 1)
    assert found.info["use_count"] == 2


@pytest.mark.parametrize("kind", ["jsonl", "sql"])
async def test_what_is_read_once_does_not_come_back_with_a_resume(tmp_path: Path, kind: str):
    first = await queue(tmp_path, kind, replay=replaying(None))
    await first.put(group(4, batch=1))
    await first.get(4, 1)
    await first.put(group(4, batch=2))
    await first.get(3, 1)
    again = await queue(tmp_path, kind, replay=replaying(None))
    again.load_state_dict(first.state_dict())
    assert [(e.eid.batch, e.eid.task) for e in await again.get(9, 0.0)] == [(2, 3)]


async def test_what_reached_its_number_of_uses_does_not_come_back_with_a_resume(tmp_path: Path):
    time, now = clock()
    name, limit = "linear_decay_use_count_control_randomization", {"use_count_limit": 2}
    replay = replaying(1.0).model_copy(update={"priority_fn": name, "priority_fn_args": limit})
    first = await queue(tmp_path, replay=replay, clock=time)
    await first.put(group(2, batch=1))
    for now[0] in (0.0, 2.0):
        assert len(await first.get(2, 0.0)) == 2
    await first.put(group(2, batch=2))
    assert len(await first.get(1, 0.0)) == 1
    again = await queue(tmp_path, replay=replay, clock=time)
    again.load_state_dict(first.state_dict())
    found = await again.get(9, 0.0)
    assert [(e.eid.batch, e.eid.task, e.info["use_count"]) for e in found] == [(2, 0, 2), (2, 1, 1)]


async def test_writer_and_reader_share_a_plain_queue():
    storage = await queue()
    writer = QueueWriter(storage)
    await writer.acquire()
    metrics = await writer.write(group(2))
    assert metrics["waiting"] == 2
    await writer.flush(1)
    assert len(await QueueReader(storage, timeout_s=1).read(4, step=1)) == 2
