"""Runners as real processes: killed, frozen, and how much the machinery costs."""

import asyncio
import os
import signal
import time
from collections import Counter
from typing import ClassVar

import pytest

from tests.explorer.fakes import EchoModel, Group, task
from trinity.common.workflows import Workflow
from trinity.explorer.pool import RunnerPool
from trinity.explorer.runner import WorkflowRunner
from trinity.explorer.scheduler import Scheduler, SchedulerSettings
from trinity.launcher.cluster import ray_cluster
from trinity.utils import actor
from trinity.utils.actor import spawn

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_TASKS = 64  # of a batch


class Suicide(Workflow):
    def run(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Freeze(Workflow):
    is_async = True

    async def run_async(self):
        time.sleep(1000)


class Meeting(EchoModel):
    """Answers no request of a batch before all that its runner has of the batch are there."""

    waiting: ClassVar[list[asyncio.Event]] = []

    def clone_with_isolated_history(self):
        return Meeting()

    async def chat_async(self, messages, n=1, **sampling):
        self.waiting.append(all_there := asyncio.Event())
        if len(self.waiting) == NUM_TASKS // 2:
            while self.waiting:
                self.waiting.pop().set()
        await all_there.wait()
        return await super().chat_async(messages, n)


class Counted:
    """A stand-in for a runner that counts the calls of each method."""

    def __init__(self, runner, calls):
        self._runner, self._calls = runner, calls

    def __getattr__(self, method):
        self._calls[method] += 1
        return getattr(self._runner, method)

    def kill(self):
        actor.kill(self._runner)


@pytest.fixture(scope="module")
def cluster():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with ray_cluster("local", "test", {"PYTHONPATH": root}):
        yield


def make(name, model, calls=None, **settings):
    def make_runner(index, generation):
        label = f"{name}_{index}.{generation}"
        runner = spawn(WorkflowRunner, index, model, name=label, namespace="test")
        return Counted(runner, Counter() if calls is None else calls)

    pool = RunnerPool(make_runner, 2, NUM_TASKS, kill=Counted.kill, grace_s=1.0)
    return Scheduler(pool, SchedulerSettings(**settings))


async def test_a_task_that_kills_its_process_is_given_up_alone(cluster):
    scheduler = make("kill", EchoModel(0.3))
    await scheduler.prepare()
    scheduler.submit(1, [task() for _ in range(4)] + [task(Suicide)] + [task() for _ in range(4)])
    result = await scheduler.collect(1)
    await scheduler.close()
    assert [s.ok for s in result.statuses] == [True] * 4 + [False] + [True] * 4
    assert len({e.eid.uid for e in result.experiences}) == 32


async def test_a_frozen_process_is_replaced_and_the_step_ends(cluster):
    scheduler = make("freeze", EchoModel(), max_timeout_s=10.0, max_retry_times=0)
    await scheduler.prepare()
    scheduler.submit(1, [task() for _ in range(4)] + [task(Freeze, repeat_times=1)])
    result = await asyncio.wait_for(scheduler.collect(1), 200)  # it would freeze for longer
    await scheduler.close()
    assert [s.ok for s in result.statuses] == [True] * 4 + [False]


async def test_a_batch_goes_to_each_runner_in_one_call_and_runs_at_once(cluster):
    calls = Counter()
    scheduler = make("fast", Meeting(), calls)
    await scheduler.prepare()
    for batch_id in range(3):
        scheduler.submit(batch_id, [task(Group, repeat_times=8) for _ in range(NUM_TASKS)])
        result = await asyncio.wait_for(scheduler.collect(batch_id), 200)
        assert len(result.experiences) == 8 * NUM_TASKS
    await scheduler.close()
    assert calls["submit"] == 3 * 2 and calls["collect"] < 3 * NUM_TASKS
