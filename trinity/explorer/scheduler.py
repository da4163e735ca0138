"""`Scheduler`: gets batches of tasks done: retries, deadlines, groups, stragglers."""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from trinity.common.errors import NotSetUpError
from trinity.common.experience import Experience, deserialize_many
from trinity.common.rewards import RewardError
from trinity.common.workflows import Task
from trinity.explorer.pool import RunnerLost, RunnerPool, UnitOverdue
from trinity.explorer.runner import CANCEL_GRACE_S
from trinity.explorer.units import RunResult, Unit, UnitResult, stable_seed
from trinity.utils.metrics import joined, summarize

_SHORTEST_DYNAMIC_S = 1.0  # below that a pause of the machine would count as a hang
_REMEMBERED_RUNS = 1024
_CUT_GRACE_S = 3.0
_MAX_DEATHS = 3  # runners lost under a task before it is held to be the cause


@dataclass(frozen=True)
class SchedulerSettings:
    """Args:
    max_timeout_s: Seconds one attempt at a run may take.
    max_retry_times: Further attempts at a run that failed. A runner that dies under a run
        costs it no attempt; a task under which three died is given up.
    dynamic_timeout_ratio: Deadline as a multiple of the mean seconds of the latest successful
        runs, `max_timeout_s` at most and 1 s at least; None: off.
    warmup_min_steps: Batches of training, or of evaluation, before the dynamic deadline is used
        for such tasks.
    max_repeat_times_per_runner: Runs of a task that go to one runner at once; None: all.
    is_sequential: Runs of one unit come one after the other on their runner.
    return_partial_tasks: Keep the finished runs of tasks that are given up.
    min_group_size: Runs with experiences that a group needs to be kept; fewer if
        `repeat_times` is less. Group-relative advantages need two.
    seed: Seed of all that is sampled.
    """

    max_timeout_s: float = 1800.0
    max_retry_times: int = 2
    dynamic_timeout_ratio: float | None = None
    warmup_min_steps: int = 1
    max_repeat_times_per_runner: int | None = None
    is_sequential: bool = False
    return_partial_tasks: bool = False
    min_group_size: int = 2
    seed: int = 42


@dataclass
class TaskStatus:
    """What became of a task. ``metrics`` has one dict for each run that succeeded."""

    task_id: int | str
    ok: bool
    attempts: int
    seconds: float
    message: str
    metrics: list[dict[str, float]]
    task: Task


@dataclass
class BatchResult:
    """Experiences of a batch by task, run and step; one status a task, in the order submitted."""

    experiences: list[Experience]
    statuses: list[TaskStatus]
    metrics: dict[str, float]


class BatchSource(Protocol):
    """What an explorer gets its rollouts from: a `Scheduler`, or users (`explorer.proxy`)."""

    async def prepare(self) -> None: ...

    def submit(self, batch_id: int | str, tasks: Sequence[Task]) -> None: ...

    async def collect(
        self, batch_id: int | str, *, min_ratio: float = 1.0, wait_after_min_s: float = 0.0
    ) -> BatchResult: ...

    def progress(self, batch_id: int | str) -> tuple[int, int]:
        """Samples of a batch under way that are done, and all of them."""
        ...

    def stop(self) -> None:
        """What is under way may be given up, and nothing more comes."""
        ...

    async def close(self) -> None: ...


@dataclass(eq=False)
class _TaskState:
    """A task under way, and what came of it so far."""

    task: Task
    done: dict[int, RunResult] = field(default_factory=dict)
    failed: dict[int, RunResult] = field(default_factory=dict)
    experiences: list[Experience] = field(default_factory=list)
    units: set[int] = field(default_factory=set)
    attempts: int = 1
    num_failures: int = 0
    num_timeouts: int = 0
    num_lost: int = 0
    seconds: float = 0.0
    is_finished: bool = False
    is_cut: bool = False

    @property
    def num_runs_with_samples(self) -> int:
        return sum(run.num_experiences > 0 for run in self.done.values())

    def take(self, result: UnitResult) -> None:
        """Keep what succeeded, note what failed."""
        for run in result.runs:
            if run.error is None:
                self.done[run.run] = run
                self.failed.pop(run.run, None)
            else:
                self.failed[run.run] = run
                self.num_failures += 1
                self.num_timeouts += run.is_timeout
        if result.payload:
            self.experiences += deserialize_many(result.payload)
        self.seconds = max(self.seconds, result.seconds)


@dataclass(eq=False)
class _Batch:
    states: list[_TaskState]
    jobs: dict[asyncio.Task[None], _TaskState]


class Scheduler:
    """Submits batches of tasks, collects their results.

    Lifecycle: ``prepare`` -> ``submit`` and ``collect``, batches may overlap -> ``close``.
    """

    def __init__(self, runners: RunnerPool, settings: SchedulerSettings | None = None) -> None:
        self._pool = runners
        self._settings = settings or SchedulerSettings()
        self._batches: dict[int | str, _Batch] = {}
        self._unit_ids = itertools.count()
        self._num_collected = {False: 0, True: 0}
        self._seconds: dict[bool, deque[float]] = {
            is_eval: deque(maxlen=_REMEMBERED_RUNS) for is_eval in (False, True)
        }  # an evaluation says nothing of how long training runs take
        self._logger = runners.logger

    async def prepare(self) -> None:
        await self._pool.prepare()

    def submit(self, batch_id: int | str, tasks: Sequence[Task]) -> None:
        """Start a batch. Its tasks get ``batch_id`` and their place in it as ``task_id``."""
        if batch_id in self._batches:
            raise ValueError(f"Batch {batch_id!r} is under way already.")
        tasks = [replace(t, batch_id=batch_id, task_id=place) for place, t in enumerate(tasks)]
        states = [_TaskState(task) for task in tasks]
        jobs = {asyncio.ensure_future(self._do_task(state)): state for state in states}
        self._batches[batch_id] = _Batch(states, jobs)

    async def collect(
        self, batch_id: int | str, *, min_ratio: float = 1.0, wait_after_min_s: float = 0.0
    ) -> BatchResult:
        """The results of a batch, once its tasks are done.

        Args:
            min_ratio: Share of the tasks that must be done; the others get ``wait_after_min_s``
                seconds more and are then given up.

        Raises:
            RewardError: A reward failed whose policy is ``on_error: raise``.
            NoRunners: Runners can't be started.
        """
        batch = self._batches[batch_id]
        try:
            stragglers = await self._wait_for(batch, min_ratio, wait_after_min_s)
            await self._cut(stragglers, batch)
        except BaseException:
            await self._cancel(batch.jobs)
            raise
        finally:
            del self._batches[batch_id]
        for is_eval in {state.task.is_eval for state in batch.states}:
            self._num_collected[is_eval] += 1
        return self._result(batch)

    def progress(self, batch_id: int | str) -> tuple[int, int]:
        """Samples of a batch under way that are done or given up, and all of them."""
        states = self._batches[batch_id].states
        done = [s.task.repeat_times if s.is_finished else len(s.done) for s in states]
        return sum(done), sum(state.task.repeat_times for state in states)

    def stop(self) -> None:
        """From here on a runner that dies is no news, and no other takes its place."""
        self._pool.let_die()

    async def close(self) -> None:
        """Give up all batches, end the runners."""
        for batch in list(self._batches.values()):
            await self._cancel(batch.jobs)
        self._batches.clear()
        await self._pool.close()

    # -- one task ------------------------------------------------------------------------------

    async def _do_task(self, state: _TaskState) -> None:
        runs = range(state.task.repeat_times)
        size = self._settings.max_repeat_times_per_runner or len(runs)
        chunks = [tuple(runs[start : start + size]) for start in range(0, len(runs), size)]
        if len(chunks) == 1:
            await self._do_runs(state, chunks[0])
        else:
            async with asyncio.TaskGroup() as group:
                for chunk in chunks:
                    group.create_task(self._do_runs(state, chunk))
        state.is_finished = True

    async def _do_runs(self, state: _TaskState, runs: tuple[int, ...]) -> None:
        """Attempts at ``runs``, until all have succeeded or no attempt is left."""
        attempt, deaths = 0, 0
        while runs:
            state.attempts = max(state.attempts, attempt + 1)
            try:
                result = await self._attempt(state, runs, attempt, is_suspect=deaths > 0)
            except RunnerLost as lost:
                deaths += 1
                state.num_lost += 1
                if deaths < _MAX_DEATHS:
                    continue
                result = _all_failed(runs, f"{deaths} runners were lost while at it; {lost}")
                attempt = self._settings.max_retry_times
            state.take(result)
            self._remember(state.task, result.runs)
            if fatal := next((run for run in result.runs if run.is_fatal), None):
                raise RewardError(f"Task {state.task.task_id}: {fatal.error}", is_fatal=True)
            if lacking := next((run for run in result.runs if run.is_not_set_up), None):
                raise NotSetUpError(lacking.error)
            runs = tuple(run.run for run in result.runs if run.error is not None)
            if state.is_cut or attempt == self._settings.max_retry_times:
                return
            attempt += 1

    async def _attempt(
        self, state: _TaskState, runs: tuple[int, ...], attempt: int, is_suspect: bool
    ) -> UnitResult:
        task = state.task
        seed = stable_seed(self._settings.seed, task.batch_id, task.task_id)
        timeout_s = self._timeout_s(task.is_eval)
        unit = Unit(next(self._unit_ids), task, runs, seed, timeout_s, attempt)
        state.units.add(unit.unit_id)
        turns = len(runs) if self._settings.is_sequential else 1
        limit_s = turns * (timeout_s + CANCEL_GRACE_S)
        try:
            result = await self._pool.run(unit, limit_s, is_suspect)
            self._log_failures(unit, result.runs)
            return result
        except UnitOverdue as error:
            self._logger.error("Task %s: %s\n%r", task.task_id, error, task.task_desc)
            return _all_failed(runs, str(error), is_timeout=True)
        finally:
            state.units.discard(unit.unit_id)

    def _log_failures(self, unit: Unit, runs: Sequence[RunResult]) -> None:
        """In the explorer's log; not on the screen, where a large batch would fill it."""
        task, failed = unit.task, [run for run in runs if run.error is not None]
        for error in dict.fromkeys(run.error for run in failed):
            numbers = ",".join(str(run.run) for run in failed if run.error == error)
            told = (task.batch_id, task.task_id, numbers, unit.attempt + 1, error)
            self._logger.info("Batch %s, task %s, run %s: attempt %d failed: %s", *told)

    def _timeout_s(self, is_eval: bool) -> float:
        settings, seconds = self._settings, self._seconds[is_eval]
        is_warm = self._num_collected[is_eval] >= settings.warmup_min_steps
        if settings.dynamic_timeout_ratio is None or not is_warm or not seconds:
            return settings.max_timeout_s
        usual_s = settings.dynamic_timeout_ratio * sum(seconds) / len(seconds)
        return min(settings.max_timeout_s, max(_SHORTEST_DYNAMIC_S, usual_s))

    def _remember(self, task: Task, runs: Iterable[RunResult]) -> None:
        self._seconds[task.is_eval].extend(run.seconds for run in runs if run.error is None)

    # -- one batch -----------------------------------------------------------------------------

    async def _wait_for(
        self, batch: _Batch, min_ratio: float, wait_after_min_s: float
    ) -> set[asyncio.Task[None]]:
        """Wait until enough is done, and the further seconds; the jobs that are not done then."""
        num_enough = math.ceil(len(batch.jobs) * min_ratio - 1e-9)
        pending = set(batch.jobs)
        while pending and len(batch.jobs) - len(pending) < num_enough:
            needs_all = num_enough == len(batch.jobs)
            when = asyncio.FIRST_EXCEPTION if needs_all else asyncio.FIRST_COMPLETED
            done, pending = await asyncio.wait(pending, return_when=when)
            _raise_first(done)
        if pending:
            done, pending = await asyncio.wait(
                pending, timeout=wait_after_min_s, return_when=asyncio.FIRST_EXCEPTION
            )
            _raise_first(done)
        return pending

    async def _cut(self, stragglers: set[asyncio.Task[None]], batch: _Batch) -> None:
        """Give up jobs; their finished runs are kept if `return_partial_tasks` says so."""
        for job in stragglers:
            state = batch.jobs[job]
            state.is_cut = True
            for unit_id in list(state.units):
                self._pool.stop(unit_id)
        if stragglers and self._settings.return_partial_tasks:
            await asyncio.wait(stragglers, timeout=_CUT_GRACE_S)
        await self._cancel(job for job in stragglers if not job.done())

    async def _cancel(self, jobs: Iterable[asyncio.Task[None]]) -> None:
        jobs = list(jobs)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    def _result(self, batch: _Batch) -> BatchResult:
        judged = [(state, self._is_kept(state)) for state in batch.states]
        statuses = [_status(state, is_kept) for state, is_kept in judged]
        experiences: list[Experience] = []
        for state, is_kept in judged:
            if is_kept:
                experiences += sorted(state.experiences, key=lambda e: (e.eid.run, e.eid.step))
        counts = _counts(judged) | {"lost_runner_count": self._pool.take_num_lost()}
        rows = [row for status in statuses if status.ok for row in status.metrics]
        metrics = summarize(rows, "rollout") | {f"rollout/{k}": float(v) for k, v in counts.items()}
        return BatchResult(experiences, statuses, metrics)

    def _is_kept(self, state: _TaskState) -> bool:
        """A group is kept if enough of its runs gave experiences, and it was not given up."""
        if state.is_cut and not self._settings.return_partial_tasks and not state.is_finished:
            return False
        size = 1 if state.task.is_eval else self._settings.min_group_size
        return state.num_runs_with_samples >= min(size, state.task.repeat_times)


def _counts(judged: Sequence[tuple[_TaskState, bool]]) -> dict[str, int]:
    """Of tasks that are kept or not: what became of them, and the runs that gave nothing."""
    states = [state for state, _ in judged]
    runs = [run for state in states for run in state.done.values()]
    return {
        "finished_task_count": sum(is_kept for _, is_kept in judged),
        "failed_task_count": sum(not is_kept and not state.is_cut for state, is_kept in judged),
        "cut_task_count": sum(state.is_cut for state in states),
        "partial_group_count": sum(
            is_kept and state.num_runs_with_samples < state.task.repeat_times
            for state, is_kept in judged
        ),
        "failed_run_count": sum(state.num_failures for state in states),
        "timeout_run_count": sum(state.num_timeouts for state in states),
        "lost_run_count": sum(state.num_lost for state in states),
        "dropped_sample_count": sum(len(run.dropped) for run in runs),
    }


def _status(state: _TaskState, is_kept: bool) -> TaskStatus:
    reasons = [run.error for run in state.failed.values() if run.error]
    reasons += [text for run in state.done.values() for text in run.dropped]
    if state.is_cut:
        reasons.append("given up: enough other tasks were done")
    rows = [joined(state.done[run].metrics) for run in sorted(state.done)]
    for row in rows:
        row["time/task_execution"] = state.seconds
    return TaskStatus(
        state.task.task_id,
        is_kept,
        state.attempts,
        state.seconds,
        "\n".join(dict.fromkeys(reasons)),
        [row for row in rows if len(row) > 1],
        state.task,
    )


def _all_failed(runs: tuple[int, ...], why: str, is_timeout: bool = False) -> UnitResult:
    return UnitResult(-1, [RunResult(run, error=why, is_timeout=is_timeout) for run in runs])


def _raise_first(jobs: Iterable[asyncio.Task[None]]) -> None:
    """Raise what ended a job: the first of a group of errors."""
    for job in jobs:
        error = None if job.cancelled() else job.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None:
            raise error
