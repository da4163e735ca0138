"""How the parts of a run end: where one has done, and where the user stops them at the start."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launcher.test_kill_and_resume import STYLES, WAIT_S, parts
from trinity.common.workflows import Task
from trinity.explorer.explorer import EvalTaskset
from trinity.launcher.build import Parts
from trinity.launcher.job import JobFolder


def with_evaluation(running: Parts) -> Parts:
    assert running.explorer is not None
    explorer = running.explorer
    explorer.evals = [EvalTaskset("unseen", [Task(is_eval=True, index={"index": 0})])]
    explorer.settings = replace(explorer.settings, eval_interval=1000, eval_on_startup=True)
    return running


@pytest.mark.parametrize("style", STYLES)
async def test_an_explorer_ends_soon_after_a_trainer_that_has_made_all_its_steps(
    style: str, tmp_path: Path
) -> None:
    running = with_evaluation(parts(JobFolder(tmp_path), STYLES[style], False, {}))
    evaluated: list[int] = []
    assert running.trainer is not None and running.explorer is not None
    running.trainer.settings = replace(running.trainer.settings, total_steps=3)
    running.explorer.report = lambda role, step, _: (
        evaluated.append(running.explorer.version) if role == "eval" else None
    )
    async with asyncio.timeout(WAIT_S):  # its tasks never end
        await running.run(None)
    assert evaluated == [0, 3]


async def test_experiences_that_end_before_the_last_step_are_told_of(tmp_path: Path) -> None:
    running = parts(JobFolder(tmp_path), STYLES["fixed"], False, {})
    assert running.trainer is not None
    running.total_steps, running.trainer.step = 5, 3
    assert (running.shortfall() or "").startswith("The experiences ended after step 3 of 5: ")
    running.trainer.step = 5
    assert running.shortfall() is None
    running.trainer.step = 3
    running.stop()
    assert running.shortfall() is None


@pytest.mark.parametrize("trains", [True, False])
async def test_a_run_that_is_stopped_while_it_starts_evaluates_nothing(
    trains: bool, tmp_path: Path
) -> None:
    running = with_evaluation(parts(JobFolder(tmp_path), STYLES["fixed"], False, {}))
    assert running.explorer is not None and running.trainer is not None
    submitted: list[int | str] = []
    running.explorer.scheduler.submit = lambda batch_id, tasks: submitted.append(batch_id)
    begun, is_ready = asyncio.Event(), asyncio.Event()

    class Loading(type(running.explorer.engines[0])):
        async def prepare(self) -> None:
            begun.set()
            await is_ready.wait()

    running.explorer.engines[:] = [Loading()]
    if not trains:
        running.trainer = None
    work = asyncio.create_task(running.run(None))
    await asyncio.wait_for(begun.wait(), WAIT_S)
    running.stop()
    is_ready.set()
    await asyncio.wait_for(work, WAIT_S)
    assert submitted == []
    assert await running.board.is_open() is not trains
