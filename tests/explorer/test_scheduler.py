import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import replace

import pytest

from tests.explorer.fakes import Blocking, EchoModel, Group, Single, task
from trinity.common.errors import NotSetUpError
from trinity.common.experience import Experience
from trinity.common.rewards import RewardError
from trinity.common.workflows import Workflow
from trinity.explorer import scheduler as scheduler_module
from trinity.explorer.pool import NoRunners, RunnerPool
from trinity.explorer.runner import CANCEL_GRACE_S, RunnerSettings, WorkflowRunner
from trinity.explorer.scheduler import Scheduler, SchedulerSettings
from trinity.explorer.units import RunResult, Unit, UnitResult
from trinity.utils.actor import ProcessDied

LIMIT_S = 60  # far more than anything here takes, unless it never ends


def make(
    num_runners=2, slots=8, model=None, runner_settings=None, runner=None, grace_s=5.0, **settings
):
    """``model`` makes the model of a runner from the runner's index and generation."""

    def make_runner(index, generation):
        answers = model(index, generation) if model else EchoModel()
        made = WorkflowRunner(index, answers, (), runner_settings)
        return runner(made, index, generation) if runner else made

    def kill(runner):
        getattr(runner, "die", int)()

    pool = RunnerPool(make_runner, num_runners, slots, kill=kill, grace_s=grace_s)
    return Scheduler(pool, SchedulerSettings(**settings))


async def collect(scheduler, tasks, batch_id=1, **kw):
    scheduler.submit(batch_id, tasks)
    return await scheduler.collect(batch_id, **kw)


@pytest.fixture
async def closing():
    open_ones = []
    yield lambda scheduler: open_ones.append(scheduler) or scheduler
    for scheduler in open_ones:
        await scheduler.close()


class Steps(Workflow):
    """Two experiences a run, each with numbers of its own."""

    def run(self):
        steps = [self.model.chat([])[0] for _ in range(2)]
        for number, step in enumerate(steps):
            step.reward, step.eid.step = 1.0, number
            step.metrics = {"tool_calls:sum": 3 * number + 1, "depth:max": number, "score": number}
        return steps


async def test_metrics_of_several_steps_are_summed_up_as_their_names_say(closing):
    scheduler = closing(make())
    await scheduler.prepare()
    result = await collect(scheduler, [task(Steps, repeat_times=2)])
    assert result.metrics["rollout/tool_calls"] == 2 * (1 + 4)
    assert result.metrics["rollout/depth"] == 1
    assert result.metrics["rollout/score/mean"] == 0.5


async def test_experiences_come_in_order_with_their_ids(closing):
    scheduler = closing(make())
    await scheduler.prepare()
    result = await collect(scheduler, [task() for _ in range(20)], batch_id=7)
    ids = [(e.eid.batch, e.eid.task, e.eid.run) for e in result.experiences]
    assert ids == [(7, t, r) for t in range(20) for r in range(4)]
    assert len({e.eid.uid for e in result.experiences}) == 80
    assert all(s.ok and len(s.metrics) == 4 for s in result.statuses)
    assert result.metrics["rollout/finished_task_count"] == 20
    assert "rollout/accuracy/mean" in result.metrics
    assert result.experiences[0].info["model_version"] == 3


@pytest.mark.parametrize("workflow", [Group, Single, Blocking])
async def test_results_do_not_depend_on_how_work_is_spread(closing, workflow):
    seen = []
    for runners, slots, chunk in [(1, 1, None), (3, 2, None), (1, 16, None)]:
        scheduler = closing(make(runners, slots, max_repeat_times_per_runner=chunk))
        await scheduler.prepare()
        result = await collect(scheduler, [task(workflow) for _ in range(6)])
        seen.append([(e.eid.uid, e.tokens.tolist()) for e in result.experiences])
    assert seen[0] == seen[1] == seen[2]


async def test_chunks_of_a_group_cover_all_runs_once(closing):
    scheduler = closing(make(max_repeat_times_per_runner=3))
    await scheduler.prepare()
    result = await collect(scheduler, [task(repeat_times=8)])
    assert [e.eid.run for e in result.experiences] == list(range(8))
    assert len({tuple(e.tokens.tolist()) for e in result.experiences}) == 8


async def test_a_failing_task_is_retried_then_left_out_with_its_text(closing):
    scheduler = closing(make(max_retry_times=2))
    await scheduler.prepare()
    tasks = [task(Single, do="raise"), task(Single)]
    result = await collect(scheduler, tasks)
    bad, good = result.statuses
    assert not bad.ok and bad.attempts == 3 and "no luck" in bad.message
    assert good.ok and {e.eid.task for e in result.experiences} == {1}
    assert result.metrics["rollout/failed_run_count"] == 12
    assert result.metrics["rollout/failed_task_count"] == 1


async def test_only_the_failed_runs_are_run_again(closing):
    scheduler = closing(make(max_retry_times=1))
    await scheduler.prepare()
    result = await collect(
        scheduler, [task(Single, do="fail_first", key="again", times=2, repeat_times=4)]
    )
    assert [e.eid.run for e in result.experiences] == [0, 1, 2, 3]
    assert result.metrics["rollout/failed_run_count"] == 2


async def test_a_group_with_two_runs_left_is_kept_and_counted(closing):
    scheduler = closing(make(max_retry_times=0))
    await scheduler.prepare()
    tasks = [
        task(Single, do="fail_first", key="two", times=2, repeat_times=4),
        task(Single, do="fail_first", key="one", times=3, repeat_times=4),
    ]
    result = await collect(scheduler, tasks)
    assert [e.eid.task for e in result.experiences] == [0, 0]
    assert result.metrics["rollout/partial_group_count"] == 1
    assert result.metrics["rollout/failed_task_count"] == 1


class Hasty:
    """A runner on which tasks with ``deadline_s`` have that long; the others all the time."""

    def __init__(self, runner, index, generation):
        self._runner = runner

    def __getattr__(self, name):
        return getattr(self._runner, name)

    async def submit(self, units):
        own = [unit.task.raw_task.get("deadline_s", unit.timeout_s) for unit in units]
        await self._runner.submit([replace(u, timeout_s=s) for u, s in zip(units, own)])


@pytest.mark.parametrize(("workflow", "do"), [(Single, "hang"), (Blocking, "loop")])
async def test_a_hanging_run_ends_at_its_deadline_and_hurts_nobody(closing, workflow, do):
    scheduler = closing(make(runner=Hasty, max_retry_times=0, max_timeout_s=LIMIT_S))
    await scheduler.prepare()
    tasks = [task(workflow, do=do, deadline_s=2.0, repeat_times=2), task(), task()]
    async with asyncio.timeout(LIMIT_S):
        result = await collect(scheduler, tasks)
    assert [s.ok for s in result.statuses] == [False, True, True]
    message = result.statuses[0].message
    assert message == f"{workflow.__name__}: not done after 2 s (explorer.max_timeout)"
    assert result.metrics["rollout/timeout_run_count"] == 2


async def test_a_thread_that_cannot_be_ended_gets_its_runner_replaced(closing):
    generations = []

    def note(runner, index, generation):
        generations.append(generation)
        return Hasty(runner, index, generation)

    scheduler = closing(make(1, max_retry_times=0, max_timeout_s=LIMIT_S, runner=note))
    await scheduler.prepare()
    # in a thread that is left
    sleeps = task(Blocking, do="sleep", seconds=30, deadline_s=1.0, repeat_times=2)
    tasks = [sleeps, task(Single, do="slow", seconds=0.1)]
    result = await collect(scheduler, tasks)
    assert [s.ok for s in result.statuses] == [False, True]
    again = await collect(scheduler, [task()], batch_id=2)
    assert again.statuses[0].ok and generations == [0, 1]


class Mortal:
    """A runner whose process can die or freeze."""

    def __init__(self, runner):
        self._runner = runner
        self._died = asyncio.Event()
        self.is_at_work = asyncio.Event()
        self.is_frozen = False

    def die(self):
        self._died.set()

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*args):
            work = asyncio.ensure_future(getattr(self._runner, name)(*args))
            death = asyncio.ensure_future(self._died.wait())
            await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
            if self.is_frozen:
                await self._died.wait()
            if self._died.is_set():
                work.cancel()
                raise ProcessDied("killed")
            death.cancel()
            if name == "submit":
                self.is_at_work.set()
            return work.result()

        return call


async def test_a_killed_runner_costs_nothing(closing):
    mortals = []

    def mortal(runner, index, generation):
        mortals.append(Mortal(runner))
        return mortals[-1]

    def model(index, generation):
        return EchoModel(0 if index or generation else 1000)  # the first does not end by itself

    scheduler = closing(make(2, model=model, runner=mortal, max_retry_times=0))
    await scheduler.prepare()
    scheduler.submit(1, [task() for _ in range(8)])
    await asyncio.wait_for(mortals[0].is_at_work.wait(), LIMIT_S)
    mortals[0].die()
    result = await scheduler.collect(1)
    ids = [(e.eid.task, e.eid.run) for e in result.experiences]
    assert ids == [(t, r) for t in range(8) for r in range(4)]
    assert result.metrics["rollout/lost_runner_count"] == 1
    assert result.metrics["rollout/failed_run_count"] == 0
    assert len(mortals) == 3


async def test_runners_that_die_while_the_run_ends_are_no_news(closing, caplog):
    """SIGTERM to a process group reaches them too."""
    mortals = []

    def mortal(runner, index, generation):
        mortals.append(Mortal(runner))
        return mortals[-1]

    scheduler = closing(
        make(2, slots=4, model=lambda *_: EchoModel(1000), runner=mortal, max_retry_times=0)
    )
    logger = scheduler._pool.logger
    logger.propagate = True
    await scheduler.prepare()
    with caplog.at_level("WARNING"):
        scheduler.submit(1, [task() for _ in range(9)])  # one more than there is room for
        for runner in mortals:
            await asyncio.wait_for(runner.is_at_work.wait(), LIMIT_S)
        scheduler.stop()
        for runner in mortals:
            runner.die()
        result = await asyncio.wait_for(scheduler.collect(1), LIMIT_S)
    logger.propagate = False
    assert not any(status.ok for status in result.statuses)
    assert "its last runner is gone" in result.statuses[8].message
    assert len(mortals) == 2 and caplog.text == ""


async def test_a_task_that_kills_its_runner_takes_no_other_with_it(closing):
    class Deadly(Mortal):
        async def _submit(self, units):
            if any(u.task.raw_task.get("do") == "kill" for u in units):
                self.die()
            await self._runner.submit(units)

        def __getattr__(self, name):
            return self._submit if name == "submit" else super().__getattr__(name)

    scheduler = closing(make(2, runner=lambda r, i, g: Deadly(r), max_retry_times=2))
    await scheduler.prepare()
    tasks = [task() for _ in range(6)] + [task(do="kill")] + [task() for _ in range(6)]
    result = await collect(scheduler, tasks)
    assert [s.ok for s in result.statuses] == [True] * 6 + [False] + [True] * 6
    assert "3 runners were lost" in result.statuses[6].message
    assert result.metrics["rollout/lost_runner_count"] == 3
    assert result.statuses[6].attempts == 1


async def test_a_frozen_runner_is_killed_after_the_deadline(closing):
    mortals = []

    class Frozen(Mortal):
        def die(self):
            scheduler._settings = replace(scheduler._settings, max_timeout_s=LIMIT_S)
            super().die()  # and the next one has time

    def mortal(runner, index, generation):
        mortals.append(Frozen(runner))
        return mortals[-1]

    scheduler = closing(make(1, runner=mortal, max_retry_times=1, max_timeout_s=1.0, grace_s=0.5))
    await scheduler.prepare()
    mortals[0].is_frozen = True
    result = await collect(scheduler, [task(), task()])
    assert all(s.ok for s in result.statuses)
    assert len(mortals) == 2


async def test_stragglers_are_given_up_and_finished_tasks_are_not(closing):
    scheduler = closing(make(slots=16))
    await scheduler.prepare()
    tasks = [task(Single) for _ in range(3)]
    tasks += [task(Single, do="slow", seconds=0.2), task(Single, do="hang")]
    async with asyncio.timeout(LIMIT_S):
        result = await collect(scheduler, tasks, min_ratio=0.6, wait_after_min_s=10.0)
    assert [s.ok for s in result.statuses] == [True, True, True, True, False]
    assert result.metrics["rollout/cut_task_count"] == 1
    assert result.metrics["rollout/failed_task_count"] == 0


@pytest.mark.parametrize("keep", [False, True])
async def test_partial_tasks_are_kept_if_asked(closing, keep, monkeypatch):
    monkeypatch.setattr(scheduler_module, "_CUT_GRACE_S", LIMIT_S)
    ended = []

    class Third(Single):
        async def run_async(self):
            if self.model.seed % 3 == 0:
                await asyncio.sleep(1000)
            found = await super().run_async()
            ended.append(self)
            return found

    class After(Single):
        async def run_async(self):
            while len(ended) < 2:
                await asyncio.sleep(0.01)
            return await super().run_async()

    scheduler = closing(make(return_partial_tasks=keep))
    await scheduler.prepare()
    wait_s = 3.0 if keep else 0.5
    tasks = [task(Third, repeat_times=12), task(After)]
    result = await collect(scheduler, tasks, min_ratio=0.5, wait_after_min_s=wait_s)
    kept = [e for e in result.experiences if e.eid.task == 0]
    assert (2 <= len(kept) < 12) if keep else not kept


HELD = set()


class Held(Single):
    """Runs without an end; ``HELD`` has those at work."""

    async def run_async(self):
        HELD.add(self)
        try:
            await asyncio.sleep(1000)
        finally:
            HELD.remove(self)


@pytest.mark.parametrize("keep", [False, True])
async def test_just_the_share_of_tasks_is_waited_for_and_nothing_of_the_rest_goes_on(
    closing, keep, monkeypatch
):
    """Of 100 tasks ``1 - 0.45`` are 55, not 56; here some of the others wait for a slot."""
    monkeypatch.setattr("trinity.explorer.scheduler._CUT_GRACE_S", LIMIT_S)
    scheduler = closing(make(1, slots=70, return_partial_tasks=keep))
    await scheduler.prepare()
    tasks = [task(Single, repeat_times=1) for _ in range(55)]
    tasks += [task(Held, repeat_times=1) for _ in range(45)]
    async with asyncio.timeout(LIMIT_S / 2):
        result = await collect(scheduler, tasks, min_ratio=1 - 0.45)
        assert [s.ok for s in result.statuses] == [True] * 55 + [False] * 45
        assert result.metrics["rollout/cut_task_count"] == 45
        assert not [t for t in asyncio.all_tasks() if "_do_task" in repr(t.get_coro())]
        while HELD:  # they are told
            await asyncio.sleep(0.01)
        again = await collect(scheduler, [task() for _ in range(70)], batch_id=2)
    assert all(status.ok for status in again.statuses)


async def test_numbers_of_a_group_that_is_left_out_are_left_out_too(closing):
    class Rated(Single):
        async def run_async(self):
            [answer] = await super().run_async()
            answer.metrics["luck"] = self.task.raw_task["luck"]
            return [answer]

    scheduler = closing(make(max_retry_times=0))
    await scheduler.prepare()
    lonely = task(Rated, do="fail_first", key="lonely", times=3, repeat_times=4, luck=9.0)
    result = await collect(scheduler, [lonely, task(Rated, luck=1.0)])
    assert [len(status.metrics) for status in result.statuses] == [1, 4]
    assert result.metrics["rollout/luck/mean"] == 1.0


class Sending:
    """A runner that can't be sent units while ``errors`` are left."""

    def __init__(self, runner, errors):
        self._runner, self._errors = runner, errors

    def __getattr__(self, name):
        return getattr(self._runner, name)

    async def submit(self, units):
        if self._errors:
            raise self._errors.pop()
        await self._runner.submit(units)


async def test_a_task_that_can_not_be_sent_is_an_error_and_a_death_in_sending_costs_nothing(
    closing,
):
    errors = [ProcessDied("killed")]
    scheduler = closing(make(1, max_retry_times=0, runner=lambda r, i, g: Sending(r, errors)))
    await scheduler.prepare()
    result = await collect(scheduler, [task(), task()])
    assert [status.ok for status in result.statuses] == [True, True]
    assert result.metrics["rollout/lost_runner_count"] == 1
    errors.append(TypeError("a lock can't be sent"))
    with pytest.raises(TypeError, match="a lock can't be sent"):
        await collect(scheduler, [task()], batch_id=2)


@pytest.mark.parametrize("can_reset", [True, False])
async def test_a_workflow_is_used_again_only_if_it_can_be_reset_and_then_for_its_own_task(
    closing, can_reset
):
    made, can = [], can_reset

    class Used(Workflow):
        can_reset = can

        def __init__(self, **given):
            super().__init__(**given)
            made.append(self)
            self.reset(self.task)

        def reset(self, task):
            self.task, self.count = task, task.raw_task["count"]

        def run(self):
            [answer] = self.model.chat([], n=1)
            answer.reward = self.count
            return [answer]

    scheduler = closing(make(1, slots=1))
    await scheduler.prepare()
    result = await collect(scheduler, [task(Used, repeat_times=1, count=n) for n in range(3)])
    assert [experience.reward for experience in result.experiences] == [0, 1, 2]
    assert len(made) == (1 if can_reset else 3)


async def test_a_run_without_experiences_is_a_failed_one(closing):
    class Silent(Workflow):
        def run(self):
            return []

    scheduler = closing(make(max_retry_times=1))
    await scheduler.prepare()
    result = await collect(scheduler, [task(Silent, repeat_times=2), task()])
    assert [status.ok for status in result.statuses] == [False, True]
    assert result.statuses[0].message == "The workflow returned no experiences."
    assert result.metrics["rollout/failed_run_count"] == 4


async def test_one_run_that_succeeds_is_enough_for_an_evaluation(closing):
    scheduler = closing(make(max_retry_times=0))
    await scheduler.prepare()
    lucky = task(Single, do="fail_first", key="lucky", times=3, repeat_times=4)
    result = await collect(scheduler, [replace(lucky, is_eval=True)], batch_id="1/unseen")
    assert [(status.ok, len(status.metrics)) for status in result.statuses] == [(True, 1)]


async def test_a_workflow_has_the_runners_log(closing):
    names = []

    class Chatty(Single):
        async def run_async(self):
            names.append(self.logger.name)
            return await super().run_async()

    scheduler = closing(make(1))
    await scheduler.prepare()
    await collect(scheduler, [task(Chatty, repeat_times=1)])
    assert names == ["trinity.part.explorer_runner_0"]


async def test_eval_gives_metrics_only(closing):
    scheduler = closing(make())
    await scheduler.prepare()
    tasks = [task(repeat_times=1) for _ in range(3)]
    for one in tasks:
        one.is_eval = True
    result = await collect(scheduler, tasks, batch_id="4/eval")
    assert not result.experiences
    assert all("accuracy" in s.metrics[0] for s in result.statuses)


async def test_a_failed_reward_is_left_out_not_zero(closing):
    def moody(response):
        if int(response) % 2:
            raise RuntimeError("judge is away")
        return 1.0

    scheduler = closing(make())
    await scheduler.prepare()
    one = task(repeat_times=16)
    one.reward_fn = moody
    result = await collect(scheduler, [one])
    assert 0 < len(result.experiences) < 16
    assert all(e.reward == 1.0 for e in result.experiences)
    dropped = 16 - len(result.experiences)
    assert result.metrics["rollout/dropped_sample_count"] == dropped
    assert "judge is away" in result.statuses[0].message


async def test_a_reward_that_must_not_fail_ends_the_batch(closing):
    def broken(response):
        raise RuntimeError("judge is away")

    scheduler = closing(make())
    await scheduler.prepare()
    one = task()
    one.reward_fn, one.reward_fn_args = broken, {"on_error": "raise"}
    with pytest.raises(RewardError, match="judge is away"):
        await collect(scheduler, [one, task()])


async def test_what_all_runs_lack_ends_the_job_at_the_first(closing):
    class NeedsAGame(Workflow):
        attempts = 0

        def run(self) -> list[Experience]:
            NeedsAGame.attempts += 1
            raise NotSetUpError("There is no game. Get one.")

    scheduler = closing(make(max_retry_times=2))
    await scheduler.prepare()
    with pytest.raises(NotSetUpError, match=r"^There is no game\. Get one\.$"):
        await collect(scheduler, [task(NeedsAGame, repeat_times=1)])
    assert NeedsAGame.attempts == 1


async def test_an_unknown_workflow_fails_by_name(closing):
    scheduler = closing(make(max_retry_times=0))
    await scheduler.prepare()
    result = await collect(scheduler, [task("math_workflwo")])
    assert "Did you mean 'math_workflow'" in result.statuses[0].message


async def test_runners_that_do_not_start_are_an_error():
    class Broken:
        async def prepare(self):
            raise ImportError("no module named wisdom")

    pool = RunnerPool(lambda index, generation: Broken(), 1, 1)
    with pytest.raises(NoRunners, match="wisdom"):
        await pool.prepare()


class Told:
    """A runner whose runs end at once, and take as long or fail as their task says."""

    def __init__(self, runner, index, generation):
        self.timeouts_s = deque()
        self._results = asyncio.Queue()

    async def prepare(self): ...

    async def close(self): ...

    async def submit(self, units):
        for unit in units:
            self.timeouts_s.append(unit.timeout_s)
            raw = unit.task.raw_task
            runs = [RunResult(run, raw.get("error"), seconds=raw["seconds"]) for run in unit.runs]
            self._results.put_nowait(UnitResult(unit.unit_id, runs))

    async def collect(self, wait_s):
        return [await self._results.get()]


@pytest.fixture
async def told(closing):
    """A scheduler on one such runner, and deadlines by batch: all tasks of one have the same."""
    runners = []

    def runner(*place):
        runners.append(Told(*place))
        return runners[-1]

    made = make(1, runner=runner, dynamic_timeout_ratio=3.0, max_timeout_s=1000, max_retry_times=0)
    scheduler = closing(made)
    await scheduler.prepare()
    batches = iter(range(100))

    async def deadline_of(*tasks):
        await collect(scheduler, tasks, next(batches))
        [timeout_s] = set(runners[0].timeouts_s)
        runners[0].timeouts_s.clear()
        return timeout_s

    return deadline_of


async def test_dynamic_deadline_follows_successful_runs(told):
    assert await told(*[task(seconds=s) for s in (1, 2, 3)]) == 1000
    assert await told(task(seconds=400)) == pytest.approx(3 * 2)
    assert await told(task(seconds=2)) == pytest.approx(3 * (1 + 2 + 3 + 400) / 4)
    assert await told(*[task(seconds=9000) for _ in range(9)]) < 1000
    assert await told(task(seconds=1)) == 1000


async def test_dynamic_deadline_does_not_know_failed_runs(told):
    """They end at a deadline or at once, so their times say nothing of how long a run takes."""
    late = [task(seconds=1000, error="not done after 1000 s") for _ in range(4)]
    at_once = [task(seconds=0, error="no such tool") for _ in range(20)]
    await told(task(seconds=2), *late)
    assert await told(*at_once) == pytest.approx(6)
    assert await told(task(seconds=2)) == pytest.approx(6)


async def test_dynamic_deadline_is_no_shorter_than_a_pause_of_the_machine(told):
    await told(task(seconds=0.01))
    assert await told(task(seconds=0.01)) == 1.0


async def test_sequential_runs_take_turns(closing):
    scheduler = closing(
        make(runner_settings=RunnerSettings(concurrent_mode="sequential"), is_sequential=True)
    )
    await scheduler.prepare()
    start = time.monotonic()
    await collect(scheduler, [task(Single, do="slow", seconds=0.1, repeat_times=4)])
    assert time.monotonic() - start > 0.4


async def test_runs_in_turn_have_the_time_to_end_of_each(closing):
    """Else a runner whose runs are all late, and long in ending, would seem frozen."""
    limits = {}

    class Noting(RunnerPool):
        async def run(self, unit, limit_s, is_suspect=False):
            limits[is_sequential] = limit_s
            return await super().run(unit, limit_s, is_suspect)

    for is_sequential in (False, True):
        pool = Noting(lambda i, g: WorkflowRunner(i, EchoModel()), 1, 1)
        settings = SchedulerSettings(max_timeout_s=60, is_sequential=is_sequential)
        scheduler = closing(Scheduler(pool, settings))
        await scheduler.prepare()
        await collect(scheduler, [task(Single, repeat_times=8)])
    assert limits == {False: 60 + CANCEL_GRACE_S, True: 8 * (60 + CANCEL_GRACE_S)}


async def test_the_log_of_the_explorer_tells_each_attempt_that_failed(closing, caplog):
    pool = RunnerPool(
        lambda i, g: WorkflowRunner(i, EchoModel()), 1, 4, logger=logging.getLogger("scout")
    )
    scheduler = closing(Scheduler(pool, SchedulerSettings(max_retry_times=1)))
    await scheduler.prepare()
    with caplog.at_level("INFO", "scout"):
        await collect(scheduler, [task(Single, do="raise", repeat_times=2), task()], batch_id=7)
    told = [record.getMessage() for record in caplog.records if record.name == "scout"]
    for attempt, line in enumerate(told, 1):
        assert line.startswith(f"Batch 7, task 0, run 0,1: attempt {attempt} failed: "), line
        assert "no luck" in line
    assert len(told) == 2


async def test_log_and_screen_say_what_runners_do(closing, caplog, tmp_path):
    said: list[str] = []

    class Held(EchoModel):
        """Answers once what there is to say was said."""

        def clone_with_isolated_history(self):
            return Held()

        async def chat_async(self, messages, n=1, **sampling):
            while not any("4 of 4 slots busy" in line for line in said):
                await asyncio.sleep(0.01)
            return await super().chat_async(messages, n)

    pool = RunnerPool(
        lambda i, g: WorkflowRunner(i, Held()),
        1,
        4,
        report_interval_s=0.05,
        say=said.append,
        logger=logging.getLogger("scout"),
    )
    scheduler = closing(Scheduler(pool))
    await scheduler.prepare()
    with caplog.at_level("INFO"):
        async with asyncio.timeout(LIMIT_S):
            await collect(scheduler, [task() for _ in range(6)])
    assert "Runner 0: 4 of 4 slots busy" in caplog.text and "2 units wait" in caplog.text
    assert any("4 of 4 slots busy" in line and "2 units wait" in line for line in said)


async def test_progress_counts_samples_that_are_done_or_given_up(closing):
    may_end = asyncio.Event()

    class Held(Single):
        async def run_async(self):
            await may_end.wait()
            return await super().run_async()

    scheduler = closing(make(max_retry_times=0))
    await scheduler.prepare()
    held = task(Held, repeat_times=1)
    scheduler.submit(1, [task(), task(Single, repeat_times=3, do="raise"), held])
    assert scheduler.progress(1) == (0, 8)
    async with asyncio.timeout(LIMIT_S):
        while scheduler.progress(1) != (7, 8):
            await asyncio.sleep(0.01)
    may_end.set()
    await scheduler.collect(1)


async def test_runs_in_threads_do_not_wait_for_each_other(closing):
    """A wait for a thread would use up the time after which a runner is held to be frozen."""
    all_there = threading.Barrier(80)

    class Meeting(Workflow):
        def run(self):
            all_there.wait(LIMIT_S)
            return self.model.chat([], n=1)

    scheduler = closing(make(1, slots=2, max_retry_times=0))
    await scheduler.prepare()
    result = await collect(scheduler, [task(Meeting, repeat_times=40) for _ in range(2)])
    assert [s.ok for s in result.statuses] == [True, True]


async def test_a_unit_stopped_before_it_began_is_reported_and_forgotten():
    runner = WorkflowRunner(0, EchoModel())
    await runner.prepare()
    await runner.submit([Unit(7, task(Single, repeat_times=2), (0, 1), 0, LIMIT_S)])
    await runner.stop([7])
    [result] = await runner.collect(LIMIT_S)
    assert result.unit_id == 7 and [run.error for run in result.runs] == ["given up"] * 2
    assert await runner.collect(0.0) == []
    await runner.close()


async def test_a_stopped_workflow_that_can_not_be_cancelled_is_counted():
    begun, may_end = asyncio.Event(), asyncio.Event()

    class Stubborn(Workflow):
        is_async = True

        async def run_async(self):
            begun.set()
            while not may_end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await may_end.wait()
            return []

    runner = WorkflowRunner(0, EchoModel())
    await runner.prepare()
    await runner.submit([Unit(7, task(Stubborn, repeat_times=1), (0,), 0, LIMIT_S)])
    await asyncio.wait_for(begun.wait(), LIMIT_S)
    await runner.stop([7])
    [result] = await runner.collect(LIMIT_S)
    assert result.num_stuck == 1
    may_end.set()
    await runner.close()


class Tidy(Workflow):
    """It puts its things away when it is cancelled, until ``may_end``."""

    is_async = True
    begun, cancelled, may_end = (asyncio.Event() for _ in range(3))
    num_begun = 0

    @classmethod
    def fresh(cls) -> type["Tidy"]:
        return type("Tidy", (cls,), {n: asyncio.Event() for n in ("begun", "cancelled", "may_end")})

    async def run_async(self):
        type(self).num_begun += 1
        self.begun.set()
        try:
            await asyncio.sleep(LIMIT_S)
        finally:
            self.cancelled.set()
            await self.may_end.wait()


async def end_of(workflow, runner, unit_id):
    """The result of a stopped unit whose workflow ends in time."""
    await asyncio.sleep(0)  # the stop arrives
    workflow.may_end.set()
    [result] = await runner.collect(LIMIT_S)
    await runner.close()
    return result


@pytest.fixture
def patient(monkeypatch):
    """What is given up has all the time to end."""
    monkeypatch.setattr("trinity.explorer.runner.CANCEL_GRACE_S", LIMIT_S)


async def test_a_unit_that_is_stopped_twice_has_its_time_to_end(patient):
    """As over-rollout does: it asks for what is done, and gives up."""
    workflow, runner = Tidy.fresh(), WorkflowRunner(0, EchoModel())
    await runner.prepare()
    await runner.submit([Unit(7, task(workflow, repeat_times=1), (0,), 0, LIMIT_S)])
    await asyncio.wait_for(workflow.begun.wait(), LIMIT_S)
    await runner.stop([7])
    await asyncio.wait_for(workflow.cancelled.wait(), LIMIT_S)
    await runner.stop([7])
    result = await end_of(workflow, runner, 7)
    assert [run.error for run in result.runs] == ["given up"] and result.num_stuck == 0


async def test_a_unit_that_is_stopped_while_a_late_run_ends_begins_no_other(patient):
    workflow = Tidy.fresh()
    runner = WorkflowRunner(0, EchoModel(), (), RunnerSettings(concurrent_mode="sequential"))
    await runner.prepare()
    await runner.submit([Unit(7, task(workflow, repeat_times=2), (0, 1), 0, 0.01)])
    await asyncio.wait_for(workflow.cancelled.wait(), LIMIT_S)
    await runner.stop([7])
    result = await end_of(workflow, runner, 7)
    assert [run.error for run in result.runs] == ["given up"] * 2 and result.num_stuck == 0
    assert workflow.num_begun == 1


async def test_a_runner_whose_start_is_cancelled_leaves_no_process():
    starting, killed = asyncio.Event(), []

    class Slow(WorkflowRunner):
        async def prepare(self):
            starting.set()
            await asyncio.sleep(LIMIT_S)

    pool = RunnerPool(lambda index, _: Slow(index, EchoModel()), 1, 1, kill=killed.append)
    preparing = asyncio.create_task(pool.prepare())
    await asyncio.wait_for(starting.wait(), LIMIT_S)
    preparing.cancel()
    await asyncio.gather(preparing, return_exceptions=True)
    assert [type(runner) for runner in killed] == [Slow]


async def test_evaluations_are_no_warm_up_of_the_dynamic_deadline(closing):
    may_end = asyncio.Event()

    class Held(Single):
        async def run_async(self):
            await may_end.wait()
            return await super().run_async()

    scheduler = closing(make(dynamic_timeout_ratio=3.0, max_timeout_s=1000, warmup_min_steps=1))
    await scheduler.prepare()
    await collect(scheduler, [replace(task(Single), is_eval=True)], batch_id="0/unseen")
    scheduler.submit(1, [task(Single, repeat_times=1), task(Held, repeat_times=1)])
    async with asyncio.timeout(LIMIT_S):
        while scheduler.progress(1)[0] < 1:
            await asyncio.sleep(0.01)
    assert scheduler._timeout_s(is_eval=False) == 1000  # the first step keeps to max_timeout
    may_end.set()
    await scheduler.collect(1)
    assert scheduler._timeout_s(is_eval=False) < 1000


async def test_runners_are_closed_side_by_side():
    all_closing = asyncio.Barrier(3)

    class Slow(WorkflowRunner):
        async def close(self):
            await all_closing.wait()
            closed.append(self)
            await super().close()

    closed: list[Slow] = []
    pool = RunnerPool(lambda index, _: Slow(index, EchoModel()), 3, 1, grace_s=LIMIT_S)
    await pool.prepare()
    await asyncio.wait_for(pool.close(), LIMIT_S / 2)
    assert len(closed) == 3


async def test_a_unit_stopped_in_the_turn_it_was_placed_in_is_not_run():
    """Told first to stop it and then to run it, a runner would run it to its end."""
    sent: list[int] = []

    class Noting(WorkflowRunner):
        async def submit(self, units):
            sent.extend(unit.unit_id for unit in units)
            await super().submit(units)

    pool = RunnerPool(lambda index, _: Noting(index, EchoModel()), 1, 1)
    await pool.prepare()
    stopped = asyncio.ensure_future(
        pool.run(Unit(7, task(Single, do="hang"), (0,), 0, 1000), LIMIT_S)
    )
    other = asyncio.ensure_future(pool.run(Unit(8, task(Single), (0,), 0, LIMIT_S), LIMIT_S))
    await asyncio.sleep(0)
    pool.stop(7)
    async with asyncio.timeout(LIMIT_S):
        assert (await other).unit_id == 8
        await asyncio.wait([stopped])
    assert stopped.cancelled() and sent == [8]
    await pool.close()
