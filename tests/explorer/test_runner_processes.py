"""Runners as real processes: killed, frozen, and how much the machinery costs."""

import asyncio
import os
import signal
import time

import pytest
import ray

from tests.explorer.fakes import EchoModel, Group, task
from trinity.common.workflows import Workflow
from trinity.explorer.pool import RunnerPool
from trinity.explorer.runner import WorkflowRunner
from trinity.explorer.scheduler import Scheduler, SchedulerSettings
from trinity.utils.actor import spawn

pytestmark = pytest.mark.ray


class Suicide(Workflow):
    def run(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Freeze(Workflow):
    is_async = True

    async def run_async(self):
        time.sleep(1000)


@pytest.fixture(scope="module")
def cluster():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    env = {"env_vars": {"PYTHONPATH": root}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=env)
    yield
    ray.shutdown()


def make(name, delay_s=0.0, num_runners=2, slots=64, **settings):
    def make_runner(index, generation):
        label = f"{name}_{index}.{generation}"
        model = EchoModel(delay_s)
        return spawn(WorkflowRunner, index, model, name=label, namespace="test")

    return Scheduler(
        RunnerPool(make_runner, num_runners, slots, grace_s=1.0), SchedulerSettings(**settings)
    )


async def test_a_task_that_kills_its_process_is_given_up_alone(cluster):
    scheduler = make("kill", delay_s=0.3)
    await scheduler.prepare()
    scheduler.submit(1, [task() for _ in range(4)] + [task(Suicide)] + [task() for _ in range(4)])
    result = await scheduler.collect(1)
    await scheduler.close()
    assert [s.ok for s in result.statuses] == [True] * 4 + [False] + [True] * 4
    assert len({e.eid.uid for e in result.experiences}) == 32


async def test_a_frozen_process_is_replaced_and_the_step_ends(cluster):
    scheduler = make("freeze", max_timeout_s=1.0, max_retry_times=0)
    await scheduler.prepare()
    start = time.monotonic()
    scheduler.submit(1, [task() for _ in range(4)] + [task(Freeze, repeat_times=1)])
    result = await scheduler.collect(1)
    await scheduler.close()
    assert [s.ok for s in result.statuses] == [True] * 4 + [False]
    assert time.monotonic() - start < 30


async def test_overhead_of_a_batch(cluster):
    scheduler = make("fast", delay_s=0.1)
    await scheduler.prepare()
    took = []
    for batch_id in range(6):
        start = time.perf_counter()
        scheduler.submit(batch_id, [task(Group, repeat_times=8) for _ in range(64)])
        result = await scheduler.collect(batch_id)
        took.append(time.perf_counter() - start)
        assert len(result.experiences) == 512
    await scheduler.close()
    print(f"batches of 64 x 8 with 0.1 s of model time: {[round(t, 3) for t in took]}")
    assert min(took) < 0.1 + 0.3
    await asyncio.sleep(0)
