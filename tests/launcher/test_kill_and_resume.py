"""Twenty times killed and resumed in each sync style: nobody waits for ever, nothing is lost.

Explorer, trainer, queue, board and checkpoints are the real ones, in one process; engines do no
work. A kill is the end of all tasks, at whatever place they are.
"""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trinity.algorithm import SAMPLE_STRATEGY
from trinity.buffer.pipelines.experience import ExperiencePipeline
from trinity.buffer.reader.queue import QueueReader
from trinity.buffer.storage.journal import JsonlJournal
from trinity.buffer.storage.queue import QueueStorage
from trinity.buffer.writer.queue import QueueWriter
from trinity.checkpoint import atomic
from trinity.common.constants import SyncStyle
from trinity.common.experience import EID, Experience
from trinity.common.models.protocol import WeightTicket
from trinity.common.workflows import Task
from trinity.explorer.explorer import Explorer, ExplorerSettings
from trinity.explorer.scheduler import BatchResult, TaskStatus
from trinity.launcher.buffers import Buffers
from trinity.launcher.build import Parts
from trinity.launcher.job import JobCheckpoints, JobFolder, find_resume_point
from trinity.synchronizer.board import VersionBoard
from trinity.synchronizer.schedule import SyncSchedule
from trinity.trainer.loss import Objective
from trinity.trainer.preparation import Preparation
from trinity.trainer.trainer import Trainer, TrainerSettings
from trinity.trainer.update import Updater

CYCLES = 20
WAIT_S = 120.0  # longer than any cycle takes, unless somebody waits for ever


class Engine:
    """Of the explorer: runs what it is given."""

    async def prepare(self) -> None: ...

    async def load_weights(self, ticket: WeightTicket) -> str:
        await asyncio.sleep(0)
        return ticket.digest

    async def health(self) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...


class TrainEngine:
    """Computes nothing; its checkpoints hold the files of the others, written as real ones are."""

    async def prepare(self) -> None: ...

    async def load(self, path: str) -> None: ...

    async def forward_backward(self, batch, objective, which="actor") -> dict[str, float]:
        await asyncio.sleep(0.001)
        return {"actor/final_loss": 0.0, "actor/ratio_max_deviation": 0.0}

    async def optim_step(self, which="actor") -> dict[str, float]:
        return {"actor/grad_norm": 0.0}

    async def send_weights(self, version: int) -> WeightTicket:
        return WeightTicket(version, "memory", f"digest {version}", None)

    async def save(self, path: str, hf=False, files=None, is_last=False) -> None:
        aside = atomic.begin_folder(Path(path))
        for name, content in (files or {}).items():
            data = content.encode() if isinstance(content, str) else content
            (aside / name).write_bytes(data)
        await asyncio.sleep(0)  # a kill here leaves it unfinished
        atomic.finish_folder(Path(path))

    async def wait_saved(self) -> None: ...

    async def health(self) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...


class Tasks:
    """Tasks without end, numbered."""

    def __init__(self) -> None:
        self.given = 0

    async def next_batch(self) -> list[Task]:
        self.given += 2
        return [Task(index={"index": self.given - 1}), Task(index={"index": self.given})]

    def feedback(self, metrics: object) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, object]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Scheduler:
    """Two runs a task, one token each."""

    def __init__(self) -> None:
        self._batches: dict[int | str, list[Task]] = {}

    async def prepare(self) -> None: ...

    def submit(self, batch_id: int | str, tasks: list[Task]) -> None:
        self._batches[batch_id] = tasks

    def progress(self, batch_id: int | str) -> tuple[int, int]:
        return 0, 0

    async def collect(self, batch_id: int | str, **_: float) -> BatchResult:
        await asyncio.sleep(0.001)
        tasks = self._batches.pop(batch_id)
        rows = [row(task.index["index"], run, batch_id) for task in tasks for run in range(2)]
        return BatchResult(
            rows, [TaskStatus(i, True, 1, 0.0, "", [], task) for i, task in enumerate(tasks)], {}
        )

    def stop(self) -> None: ...

    async def close(self) -> None: ...


def row(task: int, run: int, batch: int | str) -> Experience:
    return Experience(
        tokens=[1, 2],
        prompt_length=1,
        logprobs=[-1.0],
        reward=float(run),
        advantages=[0.5],
        returns=[0.5],
        action_mask=[True],
        eid=EID(batch, task, run),
    )


class Source:
    """The sample strategy, and a note of what each step trained on."""

    def __init__(self, reader: QueueReader, trained: dict[int, list[tuple[int, int]]]) -> None:
        self._strategy = SAMPLE_STRATEGY.get("default")(reader, 4)
        self._trained = trained

    async def sample(self, step: int) -> Any:
        found = await self._strategy.sample(step)
        self._trained[step] = [(e.eid.task, e.eid.run) for e in found[0]]
        return found

    def state_dict(self) -> dict[str, object]:
        return self._strategy.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        self._strategy.load_state_dict(state)


def parts(job: JobFolder, schedule: SyncSchedule, has_journal: bool, trained: dict) -> Parts:
    journal = JsonlJournal(job.path / "queue.jsonl") if has_journal else None
    storage = QueueStorage("queue", journal=journal, capacity=16)
    reader = QueueReader(storage, timeout_s=WAIT_S)
    buffers = Buffers(
        pipeline=ExperiencePipeline([], QueueWriter(storage)), storage=storage, reader=reader
    )
    board, engine = VersionBoard(), TrainEngine()
    explorer = Explorer(
        engines=[Engine()],
        scheduler=Scheduler(),
        tasks=Tasks(),
        sink=buffers.pipeline,
        board=board,
        schedule=schedule,
        settings=ExplorerSettings(eval_interval=0, eval_on_startup=False, sync_timeout_s=WAIT_S),
        evals=[],
    )
    checkpoints = JobCheckpoints(job, keep=2)
    trainer = Trainer(
        engine=engine,
        source=Source(reader, trained),
        preparation=Preparation(engine),
        updater=Updater(engine, Objective.from_names("ppo")),
        board=board,
        schedule=schedule,
        checkpoints=checkpoints,
        settings=TrainerSettings(save_interval=1),
    )
    checkpoints.parts = {"trainer": trainer.state_dict, "explorer": explorer.state_dict}
    checkpoints.files = buffers.snapshot
    return Parts(board, buffers, explorer, trainer, [], None)


async def killed_after(running: Parts, resume, num_steps: int, moments: int) -> None:
    """Let ``running`` make ``num_steps`` more training steps and a few moments; then no more."""
    assert running.trainer is not None
    threads = ThreadPoolExecutor(4)
    asyncio.get_running_loop().set_default_executor(threads)
    work = asyncio.create_task(running.run(resume))
    first = resume.step if resume else 0
    async with asyncio.timeout(WAIT_S / 2):
        while running.trainer.step < first + num_steps:
            await asyncio.sleep(0)
            assert not work.done() or work.result()
    for _ in range(moments):
        await asyncio.sleep(0)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.gather(work, return_exceptions=True)
    threads.shutdown()  # a real kill ends them; here they must not touch what comes next


STYLES = {
    "fixed": SyncSchedule(),
    "fixed, one step ahead": SyncSchedule(offset=1),
    "fixed, every two steps": SyncSchedule(interval=2),
    "explorer_driven": SyncSchedule(SyncStyle.EXPLORER_DRIVEN, interval=2),
    "trainer_driven": SyncSchedule(SyncStyle.TRAINER_DRIVEN, trainer_interval=2),
    "fully_async": SyncSchedule(SyncStyle.FULLY_ASYNC, trainer_interval=2),
}


@pytest.mark.parametrize("has_journal", [False, True], ids=["in memory", "journal"])
@pytest.mark.parametrize("style", STYLES)
async def test_twenty_kills_lose_nothing(style: str, has_journal: bool, tmp_path: Path) -> None:
    rng, job = random.Random(style), JobFolder(tmp_path)
    trained: dict[int, list[tuple[int, int]]] = {}
    for _ in range(CYCLES):
        resume = find_resume_point(job, lambda text: None)
        running = parts(job, STYLES[style], has_journal, trained)
        await killed_after(running, resume, rng.randint(1, 3), rng.randint(0, 30))
    last = find_resume_point(job, lambda text: None)
    assert last is not None and last.step >= CYCLES / 2
    rows = [row for step in range(1, last.step + 1) for row in trained[step]]
    assert len(rows) == len(set(rows)), "an experience was trained on twice"
    assert len(rows) == 4 * last.step
    tasks = {task for task, _ in rows}
    assert max(tasks) - len(tasks) <= 16, "tasks were left out"
