"""`WorkflowRunner`: runs workflows, as many at once as it is given; no scheduling, no retries."""

import asyncio
import inspect
import sys
import time
import traceback
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from trinity.common.errors import NotSetUpError
from trinity.common.experience import Experience, serialize_many
from trinity.common.rewards import RewardError
from trinity.common.workflows import Task, Workflow
from trinity.common.workflows.simple import REWARD_ERROR
from trinity.explorer.units import RunResult, Unit, UnitResult, stable_seed
from trinity.utils import threads
from trinity.utils.frames import is_of_trinity, traceback_without
from trinity.utils.log import get_logger
from trinity.utils.metrics import numbers
from trinity.utils.plugins import load_plugins, load_plugins_from_env
from trinity.utils.threads import CallTimeout, DeadlinePool, outwait, shared_threads

if TYPE_CHECKING:
    from trinity.common.models import ModelWrapper

_GATHER_S = 0.002  # results that end together travel together
CANCEL_GRACE_S = 1.0
"""What a run that is given up may take to end."""

_GIVEN_UP = "given up"
_OWN_FILES = (__file__, threads.__file__)  # between a workflow and what called it
_UNBOUNDED = sys.maxsize  # slots bound the runs, and one that waits for a thread looks frozen
_SWITCH_S = 0.0005  # so that a workflow that computes in a thread does not slow the others


@dataclass(frozen=True)
class RunnerSettings:
    """Args:
    concurrent_mode: Whether runs of one unit come one after the other (``sequential``) or
        all at once.
    plugin_dirs: Folders of plugins, besides those in ``TRINITY_PLUGIN_DIRS``.
    log_name: Name of the log; the runner's number is added.
    """

    concurrent_mode: Literal["sequential", "asynchronous", "multi-threading"] = "asynchronous"
    plugin_dirs: tuple[str, ...] = ()
    log_name: str = "explorer_runner"


class NoExperiences(TypeError):
    """A workflow gave something else than experiences. The text says what, and what to write."""


class WorkflowRunner:
    """Runs units and keeps their results until they are collected.

    Lifecycle: ``prepare`` -> ``submit`` and ``collect`` in any number -> ``close``.

    Args:
        index: Names the log: ``explorer_runner_<index>.log``.
        model: The model that is trained. Each run gets a clone with a history of its own.
        auxiliary_models: Judges, teachers.
    """

    def __init__(
        self,
        index: int,
        model: "ModelWrapper",
        auxiliary_models: "Sequence[ModelWrapper]" = (),
        settings: RunnerSettings | None = None,
    ) -> None:
        self._index = index
        self._model = model
        self._auxiliary_models = list(auxiliary_models)
        self._settings = settings or RunnerSettings()
        self._under_way: dict[int, asyncio.Task[UnitResult]] = {}
        self._results: list[UnitResult] = []
        self._has_results = asyncio.Event()
        self._num_stuck_coroutines = 0
        self._spare: dict[type[Workflow], list[Workflow]] = {}

    async def prepare(self) -> None:
        """Load plugins, open the log."""
        self._logger = get_logger(f"{self._settings.log_name}_{self._index}")
        sys.setswitchinterval(_SWITCH_S)
        self._threads = DeadlinePool(_UNBOUNDED, "workflow")
        load_plugins_from_env()
        load_plugins(self._settings.plugin_dirs)

    async def submit(self, units: Sequence[Unit]) -> None:
        """Start ``units``; returns at once."""
        for unit in units:
            work = asyncio.create_task(self.run_unit(unit))
            self._under_way[unit.unit_id] = work
            work.add_done_callback(partial(self._keep, unit))

    async def collect(self, wait_s: float) -> list[UnitResult]:
        """Units that are done; waits up to ``wait_s`` seconds for the first."""
        if not self._results:
            try:
                async with asyncio.timeout(wait_s):
                    await self._has_results.wait()
            except TimeoutError:
                return []
            await asyncio.sleep(_GATHER_S)
        results, self._results = self._results, []
        self._has_results.clear()
        return results

    async def stop(self, unit_ids: Sequence[int]) -> None:
        """Give up these units: runs that are done are reported, the others as failed."""
        for unit_id in unit_ids:
            if unit_id in self._under_way:
                self._under_way[unit_id].cancel()

    async def close(self) -> None:
        """Give up all that is under way."""
        await self.stop(list(self._under_way))
        if self._under_way:
            await asyncio.wait(self._under_way.values(), timeout=CANCEL_GRACE_S)
        self._threads.close()

    async def run_unit(self, unit: Unit) -> UnitResult:
        """Do the runs of ``unit``; never raises for what a workflow does."""
        start = time.perf_counter()
        outcomes: dict[int, _Outcome] = {}
        was_stopped = False
        try:
            await self._do_runs(unit, outcomes)
        except asyncio.CancelledError:
            was_stopped = True
        for run in unit.runs:
            if run not in outcomes:
                text = _GIVEN_UP if was_stopped else "not started"
                outcomes[run] = _Outcome(RunResult(run, error=text), [])
        done = [outcomes[run] for run in unit.runs]
        kept = [] if unit.task.is_eval else [e for outcome in done for e in outcome.experiences]
        return UnitResult(
            unit.unit_id,
            [outcome.result for outcome in done],
            serialize_many(kept) if kept else b"",
            time.perf_counter() - start,
            self._threads.num_stuck + self._num_stuck_coroutines + shared_threads().num_stuck,
        )

    def _keep(self, unit: Unit, work: "asyncio.Task[UnitResult]") -> None:
        """Keep what became of a unit until it is collected."""
        del self._under_way[unit.unit_id]
        if work.cancelled():  # before it began
            result = _failed_as_a_whole(unit, _GIVEN_UP)
        elif error := work.exception():  # e.g. experiences that can't be serialised
            text = "".join(traceback.format_exception(error))
            self._logger.error("Task %s: %s", unit.task.task_id, text)
            result = _failed_as_a_whole(unit, text)
        else:
            result = work.result()
        self._results.append(result)
        self._has_results.set()

    async def _do_runs(self, unit: Unit, outcomes: "dict[int, _Outcome]") -> None:
        """Fill ``outcomes`` run by run, so that a stop keeps those that are done."""
        try:
            workflow_class = unit.task.workflow_class()
        except Exception as error:  # a name or module that is not there
            outcomes |= self._failed(unit, unit.runs, error)
            return
        if workflow_class.repeats_at_once():
            outcomes |= await self._run_at_once(unit, workflow_class)
            return

        async def one(run: int) -> None:
            outcomes[run] = await self._run_one(unit, run, workflow_class)

        if self._settings.concurrent_mode == "sequential":
            for run in unit.runs:
                await one(run)
        else:
            await asyncio.gather(*map(one, unit.runs))

    async def _run_at_once(
        self, unit: Unit, workflow_class: type[Workflow]
    ) -> "dict[int, _Outcome]":
        """All runs of the unit by one call of a workflow that can repeat."""
        is_whole_group = len(unit.runs) == unit.task.repeat_times
        seed = stable_seed(unit.seed, *(() if is_whole_group else unit.runs), unit.attempt)
        start = time.perf_counter()
        try:
            experiences = await self._experiences(unit, workflow_class, seed, unit.runs)
        except Exception as error:  # whatever a workflow raises
            return self._failed(unit, unit.runs, error, time.perf_counter() - start)
        seconds = time.perf_counter() - start
        base = unit.runs[0]
        by_run: dict[int, list[Experience]] = {run: [] for run in unit.runs}
        for experience in experiences:
            place = experience.eid.run - base
            if not 0 <= place < len(unit.runs):
                misnumbered = ValueError(
                    f"The workflow numbered a run {experience.eid.run}, but was asked for runs "
                    f"{base} to {base + len(unit.runs) - 1}: set eid.run = run_id_base + i."
                )
                return self._failed(unit, unit.runs, misnumbered, seconds)
            by_run[unit.runs[place]].append(experience)
        return {run: self._done(unit, run, found, seconds) for run, found in by_run.items()}

    async def _run_one(self, unit: Unit, run: int, workflow_class: type[Workflow]) -> "_Outcome":
        seed = stable_seed(unit.seed, run, unit.attempt)
        start = time.perf_counter()
        try:
            experiences = await self._experiences(unit, workflow_class, seed, (run,))
        except Exception as error:  # whatever a workflow raises
            return self._failed(unit, (run,), error, time.perf_counter() - start)[run]
        return self._done(unit, run, experiences, time.perf_counter() - start)

    async def _experiences(
        self, unit: Unit, workflow_class: type[Workflow], seed: int, runs: tuple[int, ...]
    ) -> list[Experience]:
        """What one call of the workflow gives, or its error; `CallTimeout` past the deadline."""
        model = self._model.clone_with_isolated_history()
        model.begin_run(seed)
        auxiliary = [m.clone_with_isolated_history() for m in self._auxiliary_models]
        for place, auxiliary_model in enumerate(auxiliary):
            auxiliary_model.begin_run(stable_seed(seed, "auxiliary", place))
        workflow = self._workflow(workflow_class, unit.task, model, auxiliary)
        if workflow_class.repeats_at_once():
            workflow.set_repeat_times(len(runs), runs[0])
        if workflow_class.runs_async():
            experiences = await self._with_deadline(workflow.run_async(), unit.timeout_s)
        else:
            experiences = await self._threads.run(workflow.run, unit.timeout_s)
        if workflow_class.can_reset:
            self._spare.setdefault(workflow_class, []).append(workflow)
        found = _checked(experiences, workflow_class)
        await _tell_version(found, model)
        return found

    async def _with_deadline(
        self, run: Coroutine[object, object, list[Experience]], timeout_s: float
    ) -> list[Experience]:
        """The result of ``run``; `CallTimeout` past its deadline, even if it can't be cancelled."""
        task = asyncio.ensure_future(run)
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
        except asyncio.CancelledError:
            await self._give_up(task)
            raise
        if done:
            if task.cancelled():
                raise RuntimeError("The workflow cancelled itself.")
            return task.result()
        await self._give_up(task)
        raise CallTimeout(f"not done after {timeout_s:g} s", is_stuck=not task.done())

    async def _give_up(self, task: "asyncio.Task[list[Experience]]") -> None:
        """Cancel a workflow, and count it if it goes on all the same."""
        task.cancel()
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        try:
            await outwait(task, CANCEL_GRACE_S)
        finally:
            self._num_stuck_coroutines += not task.done()

    def _workflow(
        self,
        workflow_class: type[Workflow],
        task: Task,
        model: "ModelWrapper",
        auxiliary: "list[ModelWrapper]",
    ) -> Workflow:
        spare = self._spare.get(workflow_class)
        if not spare:
            workflow = workflow_class(task=task, model=model, auxiliary_models=auxiliary)
        else:
            workflow = spare.pop()
            workflow.model, workflow.auxiliary_model_wrappers = model, auxiliary
            workflow.reset(task)
        workflow.logger = self._logger
        return workflow

    def _done(
        self, unit: Unit, run: int, experiences: list[Experience], seconds: float
    ) -> "_Outcome":
        """Number, mark and sort out what a run gave. A run that gave nothing has failed."""
        result = RunResult(run, seconds=seconds)
        if not experiences:
            result.error = "The workflow returned no experiences."
            self._logger.warning("Task %s run %d: %s", unit.task.task_id, run, result.error)
            return _Outcome(result, [])
        kept = []
        for ordinal, experience in enumerate(experiences):
            why = experience.info.get(REWARD_ERROR)
            if experience.reward is None and why:
                result.dropped.append(str(why))
                self._logger.warning(
                    "Task %s run %d: no reward, sample left out: %s", unit.task.task_id, run, why
                )
                continue
            _mark(experience, unit, run, ordinal)
            experience.metrics["time/run_execution"] = seconds
            result.metrics.append(_numbers_of(experience))
            kept.append(experience)
        result.num_experiences = len(kept)
        return _Outcome(result, kept)

    def _failed(
        self, unit: Unit, runs: tuple[int, ...], error: Exception, seconds: float = 0.0
    ) -> "dict[int, _Outcome]":
        shown, logged = _texts(unit.task, error)
        self._logger.error(
            "Task %s run %s, attempt %d failed after %.1f s: %s\n%r",
            unit.task.task_id,
            ",".join(map(str, runs)),
            unit.attempt + 1,
            seconds,
            logged,
            unit.task.task_desc,
        )
        result = RunResult(
            runs[0],
            error=shown,
            is_timeout=isinstance(error, CallTimeout),
            is_fatal=isinstance(error, RewardError) and error.is_fatal,
            is_not_set_up=isinstance(error, NotSetUpError),
            seconds=seconds,
        )
        return {run: _Outcome(replace(result, run=run), []) for run in runs}


def _failed_as_a_whole(unit: Unit, why: str) -> UnitResult:
    return UnitResult(unit.unit_id, [RunResult(run, why) for run in unit.runs])


def _checked(given: object, workflow_class: type[Workflow]) -> list[Experience]:
    """What a workflow gave, if it is what a workflow gives; `NoExperiences` if not."""
    method = "run_async" if workflow_class.runs_async() else "run"
    name = f"{workflow_class.__name__}.{method}"
    if inspect.iscoroutine(given):
        given.close()
        raise NoExperiences(
            f"{name} is a coroutine: call it run_async, and set is_async = True in the class."
        )
    items = None if isinstance(given, str | bytes | Mapping) else given
    items = list(items) if isinstance(items, Iterable) else None
    odd = [item for item in items or () if not isinstance(item, Experience)]
    if items is None or odd:
        what = f"a {type(given).__name__} that holds {_kind(odd[0])}" if odd else _kind(given)
        raise NoExperiences(
            f"{name} returned {what}, and a workflow returns a list of experiences: "
            "end it with `return [experience]`."
        )
    return items


async def _tell_version(experiences: Sequence[Experience], model: "ModelWrapper") -> None:
    """Note the weights of now in experiences that a workflow made itself, without their versions.

    Nobody knows better, and without a version they would never be too old to be trained on.
    """
    silent = [e for e in experiences if e.token_versions is None and "model_version" not in e.info]
    if silent:
        version = await model.model_version_async
        for experience in silent:
            experience.info |= {"model_version": version, "model_version_drift": 0}


def _texts(task: Task, error: Exception) -> tuple[str, str]:
    """What is told of a failed run, with the user's frames alone, and what its log has."""
    if isinstance(error, CallTimeout):
        text = f"{_name(task.workflow)}: {error} (explorer.max_timeout)"
    elif isinstance(error, NoExperiences | NotSetUpError):
        text = str(error)
    else:
        shown = traceback_without(error, is_of_trinity)
        return shown.rstrip(), traceback_without(error, _OWN_FILES.__contains__)
    return text, text


def _name(workflow: str | type[Workflow]) -> str:
    return workflow if isinstance(workflow, str) else workflow.__name__


def _kind(value: object) -> str:
    """``value`` by its type, with its article."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


@dataclass
class _Outcome:
    result: RunResult
    experiences: list[Experience]


def _mark(experience: Experience, unit: Unit, run: int, ordinal: int) -> None:
    eid = experience.eid
    eid.batch, eid.run = unit.task.batch_id, run
    if eid.task == "":
        eid.task = unit.task.task_id
    eid.suffix = f"{stable_seed(unit.seed, run, ordinal) % 2**24:06x}"
    info = experience.info
    versions = experience.token_versions
    if versions is not None and len(versions):
        first, last = int(versions[0]), int(versions[-1])
        info["model_version"], info["model_version_drift"] = first, last - first
    info["use_count"] = 0
    info["task_index"] = unit.task.index


def _numbers_of(experience: Experience) -> dict[str, float]:
    found = numbers(experience.metrics)
    if experience.reward is not None:
        found.setdefault("reward", float(experience.reward))
    return found
