"""The rollout loop against hand-written collaborators: order of events, syncs, evaluation."""

import asyncio
import itertools
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trinity.buffer.storage.queue import QueueStorage
from trinity.common.constants import SyncStyle
from trinity.common.experience import EID, Experience
from trinity.common.models.protocol import WeightTicket
from trinity.common.workflows import Task
from trinity.explorer.benchmark import Benchmark, Candidate
from trinity.explorer.explorer import EvalTaskset, Explorer, ExplorerSettings
from trinity.explorer.scheduler import BatchResult, TaskStatus
from trinity.synchronizer.board import Board, VersionBoard
from trinity.synchronizer.file_board import FileBoard
from trinity.synchronizer.schedule import SyncSchedule, TrainerRhythm
from trinity.utils import progress


class FakeEngine:
    """Runs whatever it is given; ``lies`` makes it report a foreign digest."""

    def __init__(self, lies: bool = False) -> None:
        self.loaded: list[int] = []
        self.lies = lies

    async def prepare(self) -> None: ...

    async def load_weights(self, ticket: WeightTicket) -> str:
        self.loaded.append(ticket.version)
        return "other" if self.lies else ticket.digest

    async def close(self) -> None: ...


class FakeScheduler:
    """Answers every batch with two experiences a task."""

    def __init__(self) -> None:
        self.submitted: list[int | str] = []
        self._tasks: dict[int | str, list[Task]] = {}

    async def prepare(self) -> None: ...

    def submit(self, batch_id: int | str, tasks: list[Task]) -> None:
        self.submitted.append(batch_id)
        self._tasks[batch_id] = tasks

    async def collect(self, batch_id: int | str, **_: float) -> BatchResult:
        tasks = self._tasks.pop(batch_id)
        rows = [
            Experience(tokens=[1, 2, 3], prompt_length=1, reward=1.0, eid=EID(batch_id, place, run))
            for place in range(len(tasks))
            for run in range(2)
        ]
        statuses = [
            TaskStatus(i, True, 1, 0.1, "", [{"reward": 0.5, "accuracy": 1.0}], task)
            for i, task in enumerate(tasks)
        ]
        return BatchResult(rows, statuses, {})

    def stop(self) -> None: ...

    def progress(self, batch_id: int | str) -> tuple[int, int]:
        return 0, len(self._tasks[batch_id])

    async def close(self) -> None: ...


class FakeTasks:
    """``total`` batches of two tasks."""

    def __init__(self, total: int) -> None:
        self.total, self.given = total, 0

    async def next_batch(self) -> list[Task]:
        if self.given == self.total:
            raise StopAsyncIteration
        self.given += 1
        return [Task(), Task()]

    def feedback(self, metrics: object) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {"selection/unseen/capability": 0.5}

    def state_dict(self) -> dict[str, object]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class FakeSink:
    """Counts what it is given and remembers in which order."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.flushed: list[int] = []

    async def process(self, experiences: list[Experience]) -> dict[str, object]:
        self.events.append(f"write {len(experiences)}")
        return {"experience_pipeline/experience_count": float(len(experiences))}

    async def flush(self, until: int) -> None:
        self.flushed.append(until)

    async def close(self) -> None:
        self.events.append("closed")


class SharedSink(FakeSink):
    """Writes to a queue that a trainer reads."""

    def __init__(self, events: list[str], storage: QueueStorage) -> None:
        super().__init__(events)
        self.storage = storage

    async def process(self, experiences: list[Experience]) -> dict[str, object]:
        await self.storage.put(experiences)
        return await super().process(experiences)

    async def flush(self, until: int) -> None:
        await self.storage.flush(until)

    async def close(self) -> None:
        await super().close()
        await self.storage.release()


def ticket(version: int) -> WeightTicket:
    return WeightTicket(version, "memory", f"digest {version}", None)


class Scene:
    """An explorer among fakes, and a trainer that publishes a version for each written step."""

    def __init__(
        self,
        steps: int = 3,
        schedule: SyncSchedule | None = None,
        lies: bool = False,
        engine: FakeEngine | None = None,
        board: Board | None = None,
        **settings,
    ) -> None:
        self.events: list[str] = []
        self.reports: list[tuple[str, int, dict]] = []
        self.board = board or VersionBoard()
        self.engine = engine or FakeEngine(lies)
        self.scheduler = FakeScheduler()
        self.sink = FakeSink(self.events)
        self.explorer = Explorer(
            engines=[self.engine],
            scheduler=self.scheduler,
            tasks=FakeTasks(steps),
            sink=self.sink,
            board=self.board,
            schedule=schedule or SyncSchedule(),
            settings=ExplorerSettings(**{"eval_interval": 2, "sync_timeout_s": 60.0, **settings}),
            evals=[EvalTaskset("unseen", [Task(is_eval=True)])],
            report=lambda *row: self.reports.append(row),
        )

    async def run_with_trainer(self, steps: int, first: int = 0) -> None:
        """Explorer and a trainer that publishes ``first + 1`` to ``steps``, one a written step."""

        async def train() -> None:
            for version in range(first + 1, steps + 1):
                while sum(e.startswith("write") for e in self.events) < version - first:
                    await asyncio.sleep(0.001)
                await self.board.publish(ticket(version))
            await self.board.close("done")

        await asyncio.gather(self.explorer.run(), train())


async def test_a_synchronous_run_takes_each_version_in_turn():
    scene = Scene(steps=3)
    await scene.run_with_trainer(3)
    assert scene.engine.loaded == [1, 2, 3]
    assert scene.events == ["write 4", "write 4", "write 4", "closed"]
    assert scene.sink.flushed == [1, 2, 3]


async def test_the_first_interval_between_weights_does_not_hold_the_start():
    scene = Scene(steps=2)
    scene.explorer._synced_at -= 1e6  # made long before it runs
    await scene.run_with_trainer(2)
    found = [
        m["explore/time/sync_interval"]
        for *_, m in scene.reports
        if "explore/time/sync_interval" in m
    ]
    assert len(found) == 2 and max(found) < 1e5


async def test_operators_numbers_of_any_kind_are_reported():
    class Sink(FakeSink):
        async def process(self, experiences: list[Experience]) -> dict[str, object]:
            found = {"score": np.float32(0.5), "kept": torch.tensor(3), "kind": "x", "on": None}
            return await super().process(experiences) | found

    scene = Scene(steps=1)
    scene.explorer.sink = Sink(scene.events)
    await scene.run_with_trainer(1)
    [step] = [m for role, _, m in scene.reports if role == "explorer" and "score" in m]
    assert (step["score"], step["kept"]) == (0.5, 3.0)
    assert not {"kind", "on"} & step.keys()


async def test_evaluates_at_the_start_on_the_interval_and_at_the_end():
    scene = Scene(steps=3)
    await scene.run_with_trainer(3)
    evals = [(step, m) for role, step, m in scene.reports if role == "eval"]
    assert [step for step, _ in evals] == [0, 2, 3]
    assert evals[0][1]["eval/unseen/accuracy/mean@1"] == 1.0


@pytest.mark.parametrize(("num_cut", "is_refused"), [(2, True), (1, False)])
async def test_prompts_that_are_all_too_long_make_no_finished_run(num_cut: int, is_refused: bool):
    scene = Scene(steps=2)
    answer = scene.scheduler.collect

    async def collect(batch_id: int | str, **how: float) -> BatchResult:
        result = await answer(batch_id, **how)
        if isinstance(batch_id, int) and batch_id <= num_cut:
            for experience in result.experiences:
                experience.truncate_status = "prompt_truncated"
        return result

    scene.scheduler.collect = collect
    refused = pytest.raises(RuntimeError, match=r"all prompts .* longer than model.max_prompt")
    with refused if is_refused else nullcontext():
        await scene.run_with_trainer(2)
    assert "closed" in scene.events


def evaluations_fail(scene: Scene, first: int = 0) -> None:
    """Every task of the evaluations from number ``first`` on fails."""
    answer, seen = scene.scheduler.collect, itertools.count()

    async def collect(batch_id: int | str, **how: float) -> BatchResult:
        result = await answer(batch_id, **how)
        if isinstance(batch_id, str) and next(seen) >= first:
            failed = [replace(s, ok=False, message="no luck", metrics=[]) for s in result.statuses]
            return BatchResult([], failed, {})
        return result

    scene.scheduler.collect = collect


async def test_an_evaluation_in_which_all_tasks_fail_is_told_and_training_goes_on(caplog):
    scene = Scene(steps=1)
    evaluations_fail(scene)
    await scene.run_with_trainer(1)
    assert "Evaluation of unseen: all tasks failed. The last one: no luck" in caplog.text


@pytest.mark.parametrize(("first_to_fail", "is_refused"), [(0, True), (1, False)])
async def test_a_benchmark_without_a_single_score_is_a_failed_run(
    first_to_fail: int, is_refused: bool
):
    scene = Scene(steps=0)
    evaluations_fail(scene, first_to_fail)
    candidates = [Candidate(step, lambda step=step: ticket(step)) for step in (1, 2)]
    with (
        pytest.raises(RuntimeError, match=r"All tasks failed in every evaluation.*no luck")
        if is_refused
        else nullcontext()
    ):
        await Benchmark(scene.explorer, candidates).run()


async def test_a_benchmark_that_is_stopped_has_not_failed():
    scene = Scene(steps=0)
    evaluations_fail(scene)
    scene.explorer.stop()
    await Benchmark(scene.explorer, []).run()


@pytest.mark.parametrize(("total_steps", "evaluated"), [(4, [4]), (None, [3, 4])])
async def test_the_last_evaluation_is_of_the_last_weights(
    total_steps: int | None, evaluated: list[int]
):
    scene = Scene(4, SyncSchedule(offset=1), total_steps=total_steps, eval_interval=4)
    versions: list[int] = []
    scene.explorer.report = lambda role, step, _: (
        versions.append(scene.explorer.version) if (role, step) == ("eval", 4) else None
    )

    async def train() -> None:
        for version in (1, 2, 3):
            while len(scene.events) < version:
                await asyncio.sleep(0)
            await scene.board.publish(ticket(version))
        while scene.events[-1] != "closed":
            await asyncio.sleep(0)
        await scene.board.publish(ticket(4))
        await scene.board.close("done")

    await asyncio.gather(scene.explorer.run(), train())
    assert versions == evaluated


async def test_with_an_offset_the_first_steps_do_not_wait():
    scene = Scene(steps=4, schedule=SyncSchedule(offset=1))
    await scene.run_with_trainer(4)
    assert scene.scheduler.submitted[:3] == ["0/unseen", 1, 2]
    assert scene.sink.flushed[0] == 1
    assert scene.engine.loaded[-1] == 4


async def test_an_engine_that_runs_other_weights_ends_the_run():
    scene = Scene(lies=True)
    with pytest.raises(RuntimeError, match=r"digest other .* trainer sent digest 1"):
        await scene.run_with_trainer(1)


async def test_no_new_weights_within_the_timeout_names_the_trainer():
    scene = Scene(sync_timeout_s=0.05)
    with pytest.raises(TimeoutError, match="newer than version 0 from the trainer"):
        await scene.explorer.run()


async def test_a_trainer_that_ended_ends_the_explorer():
    scene = Scene(steps=5)
    await scene.run_with_trainer(2)
    assert scene.explorer.step == 3
    assert scene.events[-1] == "closed"


async def test_a_checkpoint_in_the_first_step_does_not_hold_it():
    """Its experiences are not written yet: a resume has to make them again."""
    states = []

    class Sink(FakeSink):
        async def process(self, experiences: list[Experience]) -> dict[str, object]:
            states.append(scene.explorer.state_dict())
            return await super().process(experiences)

    scene = Scene(steps=2)
    scene.explorer.sink = Sink(scene.events)
    await scene.run_with_trainer(2)
    assert states == [{"latest_iteration": n, "tasks": {"given": n}} for n in (0, 1)]


async def test_only_training_steps_do_without_their_stragglers():
    asked = {}

    class Told(FakeScheduler):
        async def collect(self, batch_id: int | str, **bounds: float) -> BatchResult:
            asked[batch_id] = bounds
            return await super().collect(batch_id)

    scene = Scene(steps=1, eval_interval=1, min_ratio=0.7, wait_after_min_s=4.0)
    scene.explorer.scheduler = Told()
    await scene.run_with_trainer(1)
    whole, part = [{"min_ratio": r, "wait_after_min_s": s} for r, s in ((1.0, 0.0), (0.7, 4.0))]
    assert asked == {"0/unseen": whole, 1: part, "1/unseen": whole}


async def test_a_trainer_with_all_its_steps_made_ends_the_explorer_after_its_step():
    class Sink(FakeSink):
        async def process(self, experiences: list[Experience]) -> dict[str, object]:
            scene.explorer.end_after_step()
            return await super().process(experiences)

    scene = Scene(steps=5)
    scene.explorer.sink = Sink(scene.events)
    await scene.run_with_trainer(1)
    assert scene.events == ["write 4", "closed"] and scene.engine.loaded == [1]


async def test_weights_that_the_engines_run_already_are_not_loaded_again():
    scene = Scene()
    await scene.board.publish(ticket(2))
    for _ in range(2):
        await scene.explorer.take_newest_weights()
    assert scene.engine.loaded == [2] and scene.explorer.version == 2


async def test_state_stands_after_the_last_written_step():
    scene = Scene(steps=2)
    await scene.run_with_trainer(2)
    state = scene.explorer.state_dict()
    assert state == {"latest_iteration": 2, "tasks": {"given": 2}}
    again = Scene(steps=4, eval_on_startup=True)
    again.explorer.load_state_dict(state)
    await again.board.publish(ticket(2))
    await again.run_with_trainer(4, first=2)
    assert again.scheduler.submitted[0] == 3
    assert again.engine.loaded == [2, 3, 4]


@pytest.mark.parametrize(("rows", "interval"), [(2, 1), (4, 1), (6, 1), (8, 1), (8, 2), (12, 2)])
async def test_a_trainer_of_another_command_gets_full_batches(
    rows: int, interval: int, tmp_path: Path
):
    """The explorer writes 4 rows a step, and learns from the trainer when its weights are due."""
    storage = QueueStorage("shared")
    scene = Scene(12, SyncSchedule(rows=4), board=FileBoard(tmp_path), eval_on_startup=False)
    scene.explorer.sink = SharedSink(scene.events, storage)
    sizes: list[int] = []

    async def train() -> None:
        while "write 4" not in scene.events:
            await asyncio.sleep(0.001)
        board = FileBoard(tmp_path, TrainerRhythm(rows, interval))
        await board.reopen(0)
        while batch := await storage.get(rows, 60, step=len(sizes) + 1):
            sizes.append(len(batch))
            if len(sizes) % interval == 0:
                await board.publish(ticket(len(sizes)))
        await board.close("done")

    await storage.acquire()
    await asyncio.wait_for(asyncio.gather(scene.explorer.run(), train()), 60)
    assert sizes == [rows] * (12 * 4 // rows)


async def test_an_explorer_that_goes_on_waits_for_the_trainer_of_its_own_time(tmp_path: Path):
    """That of an earlier run has ended, and said so."""
    earlier = FileBoard(tmp_path, TrainerRhythm(4))
    await earlier.reopen(0)
    await earlier.publish(ticket(1))
    await earlier.close("the trainer ended after step 1")
    scene = Scene(3, board=FileBoard(tmp_path), eval_on_startup=False)
    await scene.explorer.prepare()

    async def train() -> None:
        while "write 4" not in scene.events:
            await asyncio.sleep(0.001)
        board = FileBoard(tmp_path, TrainerRhythm(4))
        await board.reopen(1)
        for version in (2, 3):
            await board.publish(ticket(version))
        await board.close("done")

    await asyncio.wait_for(asyncio.gather(scene.explorer.run(), train()), 60)
    assert scene.explorer.step == 3 and scene.explorer.version == 3


async def test_an_explorer_with_nothing_left_to_do_waits_for_no_trainer_that_has_ended(
    tmp_path: Path,
):
    await FileBoard(tmp_path).close("the trainer ended after step 3")
    scene = Scene(0, board=FileBoard(tmp_path), eval_on_startup=False)
    await scene.explorer.prepare()
    await asyncio.wait_for(scene.explorer.run(), 60)


async def test_an_explorer_of_no_trainer_ends_with_its_last_step(tmp_path: Path):
    scene = Scene(
        *(2, SyncSchedule(SyncStyle.TRAINER_DRIVEN)),
        board=FileBoard(tmp_path),
        has_trainer=False,
        sync_timeout_s=600,
    )
    await asyncio.wait_for(scene.explorer.run(), 60)
    assert scene.events == ["write 4", "write 4", "closed"]
    assert [step for role, step, _ in scene.reports if role == "eval"] == [0, 2]


async def test_explorer_driven_goes_on_with_old_weights_if_there_are_no_newer():
    scene = Scene(steps=2, schedule=SyncSchedule(SyncStyle.EXPLORER_DRIVEN))

    async def decline() -> None:
        for _ in range(2):
            await scene.board.wait_asked()
            await scene.board.decline()
        await scene.board.close("done")

    await asyncio.gather(scene.explorer.run(), decline())
    assert scene.engine.loaded == []
    assert scene.explorer.step == 2


async def test_trainer_driven_takes_the_newest_without_waiting():
    scene = Scene(steps=2, schedule=SyncSchedule(SyncStyle.TRAINER_DRIVEN))
    await scene.board.publish(ticket(7))
    await scene.board.close("done")
    await scene.explorer.run()
    assert scene.engine.loaded == [7]


@pytest.mark.parametrize("is_newer_out", [True, False])
async def test_weights_that_the_trainer_dropped_meanwhile_give_way_to_newer_ones(
    is_newer_out: bool,
):
    """A channel of files keeps two versions, and a trainer may be quicker than a load."""

    class Slow(FakeEngine):
        async def load_weights(self, ticket: WeightTicket) -> str:
            if ticket.version == 1:
                if is_newer_out:
                    await scene.board.publish(WeightTicket(4, "memory", "digest 4", None))
                raise FileNotFoundError("weights_1")
            return await super().load_weights(ticket)

    scene = Scene(1, SyncSchedule(SyncStyle.TRAINER_DRIVEN), engine=Slow())
    await scene.board.publish(ticket(1))
    await scene.board.close("done")
    if not is_newer_out:
        with pytest.raises(FileNotFoundError, match="weights_1"):
            await scene.explorer.run()
        return
    await scene.explorer.run()
    assert scene.engine.loaded == [4] and scene.explorer.version == 4


async def test_a_run_in_which_every_task_fails_ends_with_the_cause():
    scene = Scene(steps=9, schedule=SyncSchedule(SyncStyle.TRAINER_DRIVEN))

    async def collect(batch_id: int | str, **_: float) -> BatchResult:
        return BatchResult([], [TaskStatus(0, False, 3, 0.1, "no such tool", [], Task())], {})

    scene.scheduler.collect = collect
    with pytest.raises(RuntimeError, match=r"3 steps in a row.*no such tool"):
        await scene.explorer.run()


def failing(scene: "Scene", *steps: int) -> None:
    """Every task of these steps fails, and those of others don't."""
    answer = scene.scheduler.collect

    async def collect(batch_id: int | str, **how: float) -> BatchResult:
        if batch_id not in steps:
            return await answer(batch_id, **how)
        return BatchResult([], [TaskStatus(0, False, 3, 0.1, "no such tool", [], Task())], {})

    scene.scheduler.collect = collect


async def test_a_run_too_short_to_fail_for_long_ends_with_the_cause_too():
    scene = Scene(steps=2, schedule=SyncSchedule(SyncStyle.TRAINER_DRIVEN))
    failing(scene, 1, 2)
    with pytest.raises(RuntimeError, match=r"in all 2 steps of this run.*no such tool"):
        await scene.explorer.run()


async def test_a_run_of_which_one_step_gave_something_ends_well():
    scene = Scene(steps=2, schedule=SyncSchedule(SyncStyle.TRAINER_DRIVEN))
    failing(scene, 2)
    await scene.board.close("done")
    await scene.explorer.run()


async def test_failures_are_no_error_of_a_run_that_is_stopped():
    scene = Scene(steps=2, schedule=SyncSchedule(SyncStyle.TRAINER_DRIVEN))
    failing(scene, 1)
    answer = scene.scheduler.collect

    async def collect(batch_id: int | str, **how: float) -> BatchResult:
        scene.explorer.stop()
        return await answer(batch_id, **how)

    scene.scheduler.collect = collect
    await scene.explorer.run()


async def test_what_takes_long_is_shown_and_taken_away(monkeypatch):
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    scene = Scene(steps=1, eval_on_startup=False)
    shown: list[str] = []
    scene.explorer.show = lambda text, is_to_stay: shown.append(text)
    answer = scene.scheduler.collect

    def is_shown() -> bool:
        return any(re.match(r"evaluating unseen: 0 of 1 samples   \d+ s so far", t) for t in shown)

    async def collect(batch_id: int | str, **how: float) -> BatchResult:
        while batch_id != 1 and not is_shown():
            await asyncio.sleep(0.01)
        return await answer(batch_id, **how)

    scene.scheduler.collect = collect
    await scene.run_with_trainer(1)
    assert is_shown() and shown[-1] == ""


class SleepyEngine(FakeEngine):
    """Notes when it sleeps, and refuses to sleep twice."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    async def sleep(self) -> None:
        assert self.log[-1:] != ["sleep"]
        self.log.append("sleep")

    async def wake(self) -> None:
        self.log.append("wake")

    async def load_weights(self, ticket: WeightTicket) -> str:
        self.log.append(f"load {ticket.version}")
        return await super().load_weights(ticket)


async def test_engines_that_share_the_trainers_gpu_sleep_until_its_weights_are_there():
    engine = SleepyEngine()
    scene = Scene(2, engine=engine, shares_gpus=True)
    await scene.run_with_trainer(2)
    turns = [event for event in engine.log if event != "wake"]
    assert turns[:4] == ["sleep", "load 1", "sleep", "load 2"]
    assert engine.log[-1] == "wake"


async def test_what_a_selector_tells_is_reported_with_the_step():
    scene = Scene(steps=1)
    await scene.run_with_trainer(1)
    [found] = [m for role, step, m in scene.reports if "selection/unseen/capability" in m]
    assert found["selection/unseen/capability"] == 0.5


@pytest.mark.parametrize("is_training", [True, False])
async def test_the_end_is_waited_for_as_long_as_the_trainer_makes_steps(is_training: bool):
    schedule = SyncSchedule(SyncStyle.TRAINER_DRIVEN, trainer_interval=1000)
    scene = Scene(steps=1, schedule=schedule, sync_timeout_s=0.01)
    num_asked = 0

    def steps() -> int:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 10:
            closing.append(asyncio.ensure_future(scene.board.close("done")))
        return num_asked if is_training else 0

    closing: list[asyncio.Future[None]] = []
    scene.explorer.trainer_steps = steps
    if is_training:
        await scene.explorer.run()
    else:
        with pytest.raises(TimeoutError, match="newer than version 0"):
            await scene.explorer.run()
