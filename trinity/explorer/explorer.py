"""The rollout loop: tasks to workflows, experiences to the buffer, new weights to the engines."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from trinity.common.constants import SyncStyle
from trinity.common.deadlines import together, within
from trinity.common.experience import Experience
from trinity.common.models.protocol import InferenceEngine, WeightTicket
from trinity.common.workflows import Task
from trinity.explorer.engine_keeper import START_TIMEOUT_S, EngineKeeper
from trinity.explorer.evaluation import summarize_eval
from trinity.explorer.scheduler import BatchResult, BatchSource, TaskStatus
from trinity.synchronizer.board import Board
from trinity.synchronizer.schedule import SyncSchedule
from trinity.utils.log import get_logger
from trinity.utils.metrics import Metrics, numbers, prefix_metrics, summarize
from trinity.utils.progress import Pace, Show, showing
from trinity.utils.timer import timed
from trinity.utils.words import counted

Report = Callable[[str, int, Metrics], None]

_MAX_FAILED_STEPS = 3


class TaskSource(Protocol):
    """Where the training tasks come from (`trinity.buffer`)."""

    async def next_batch(self) -> list[Task]:
        """The tasks of the next step; StopAsyncIteration when there are none left."""
        ...

    def feedback(self, metrics: Mapping[str, object]) -> None:
        """What the pipeline learned of the tasks, for selectors with a curriculum."""
        ...

    def metrics(self) -> Metrics:
        """What selectors tell of themselves, by its final name."""
        ...

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: dict[str, object]) -> None: ...


class ExperienceSink(Protocol):
    """Where experiences go (`trinity.buffer.pipelines`)."""

    async def process(self, experiences: list[Experience]) -> dict[str, object]:
        """Shape and write the experiences of one step; metrics."""
        ...

    async def flush(self, until: int) -> None:
        """Nothing more comes before the weights of training step ``until``: don't wait for it."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class EvalTaskset:
    """A named set of tasks that is run for its score only."""

    name: str
    tasks: Sequence[Task]


@dataclass(frozen=True)
class ExplorerSettings:
    """How the explorer goes about its steps.

    Args:
        total_steps: Steps to run; None: until the tasks run out.
        eval_interval: Steps between two evaluations; 0 never evaluates.
        eval_on_startup: Evaluate the starting weights before step 1 (not after a resume).
        min_ratio, wait_after_min_s: Over-rollout: go on once this share of the tasks is done and
            the others had this many more seconds.
        sync_timeout_s: Seconds to wait for new weights.
        detailed_stats: Evaluation also reports max, min and standard deviation.
        metric_prefix: "eval", or "bench" for a benchmark.
        shares_gpus: The trainer works on the engines' GPUs: they sleep while they wait for it.
        has_trainer: Whether one ever sends weights, so that its last ones are waited for.
        waits_for: What is shown while new weights are waited for.
    """

    total_steps: int | None = None
    eval_interval: int = 100
    eval_on_startup: bool = True
    min_ratio: float = 1.0
    wait_after_min_s: float = 30.0
    sync_timeout_s: float = 3600.0
    detailed_stats: bool = False
    metric_prefix: str = "eval"
    shares_gpus: bool = False
    has_trainer: bool = True
    waits_for: str = "in training"


@dataclass
class Explorer:
    """Rolls out tasks step by step. ``prepare`` -> ``run`` -> ``close``.

    Collaborators are plain objects or stand-ins; nothing is started before `prepare`.

    Args:
        auxiliary: Engines of other models. Others start and end them; `watching` sees to it that
            they live.
        show: Gets what is under way, each second; an empty line when it is over.
        trainer_steps: Steps of a trainer of the same run: while it makes any, its end is awaited.
    """

    engines: Sequence[InferenceEngine]
    scheduler: BatchSource
    tasks: TaskSource
    sink: ExperienceSink
    board: Board
    schedule: SyncSchedule
    settings: ExplorerSettings
    evals: Sequence[EvalTaskset] = ()
    auxiliary: Sequence[InferenceEngine] = ()
    report: Report = lambda role, step, metrics: None
    show: Show = lambda text, is_to_stay: None
    trainer_steps: Callable[[], int] = lambda: 0
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("explorer"))
    step: int = 0
    version: int = 0
    _evaluated: tuple[int, int] | None = None
    _failed_steps: int = 0
    _num_cut: int = 0
    _num_sampled: int = 0
    _num_evaluated: int = 0
    _last_failure: str = ""
    _is_stopping: bool = False
    _is_trained: bool = False
    _finished_state: dict[str, object] | None = None
    _synced_at: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self._keeper = EngineKeeper(
            self.engines, self.auxiliary, self.logger, newest=self.board.newest
        )

    async def watching(self, work: Coroutine[object, object, None]) -> None:
        """Do ``work`` while engines that die are brought back.

        Raises:
            ConnectionError: One can't be brought back.
        """
        await self._keeper.watching(work)

    async def prepare(self) -> None:
        """Start engines and runners side by side."""
        await self.board.join()
        await together(*map(self._start, range(len(self.engines))), self.scheduler.prepare())
        self.logger.info("Ready: %s.", counted(len(self.engines), "engine"))

    async def _start(self, index: int) -> None:
        wait, hint = self.engines[index].prepare(), "Its log says how far it came."
        await within(START_TIMEOUT_S, wait, f"engine {index}", "the start", hint)

    async def run(self) -> None:
        """All steps, in order; the experience writer is closed at the end.

        Raises:
            RuntimeError: Nothing was sampled: all tasks failed, or all prompts are too long.
        """
        self._finished_state = self.state_dict()
        await self.take_newest_weights()
        self._synced_at, before = time.perf_counter(), self.step
        if self.step == 0 and self.settings.eval_on_startup:
            await self.evaluate()
        while not self._is_done():
            try:
                tasks = await self.tasks.next_batch()
            except StopAsyncIteration:
                self.logger.info("No tasks left after step %d.", self.step)
                break
            self.step += 1
            rollout: Metrics = {}
            sync: Metrics = {}
            with timed(sync, "explorer/time/step"):
                result = await self._roll_out(tasks, rollout)
                await self._write(result, rollout)
                self._tell(rollout)  # the sync may wait for a long training step
                is_open = await self._sync_if_due(sync)
            self._tell(sync)
            if not is_open:
                break
            await self._evaluate_if_due()
        self._refuse_failure_throughout(self.step - before)
        await self._finish()
        self._refuse_long_prompts_alone()

    def _tell(self, metrics: Metrics) -> None:
        self.report("explorer", self.step, metrics)
        self.logger.info("Step %d: %s", self.step, metrics)

    def stop(self) -> None:
        """Start no further step, and evaluate no more."""
        self._is_stopping = True
        self.scheduler.stop()

    def end_after_step(self) -> None:
        """Start no further step: the trainer has made all of its own."""
        self._is_trained = True

    def _is_done(self) -> bool:
        total = self.settings.total_steps
        is_ending = self._is_stopping or self._is_trained
        return is_ending or (total is not None and self.step >= total)

    async def _roll_out(self, tasks: list[Task], metrics: Metrics) -> BatchResult:
        self.logger.info(
            "Step %d: %d tasks, weights of version %d.", self.step, len(tasks), self.version
        )
        with timed(metrics, "rollout/time/step"):
            self.scheduler.submit(self.step, tasks)
            result = await self._collect(
                self.step,
                f"step {self.step}",
                min_ratio=self.settings.min_ratio,
                wait_after_min_s=self.settings.wait_after_min_s,
            )
        metrics |= self._rollout_metrics(result, metrics["rollout/time/step"])
        self._refuse_endless_failure(result)
        cut = _num_cut(result)
        self._num_cut += cut
        self._num_sampled += len(result.experiences) - cut
        return result

    async def _collect(
        self,
        batch_id: int | str,
        what: str,
        *,
        min_ratio: float = 1.0,
        wait_after_min_s: float = 0.0,
    ) -> BatchResult:
        """The results of a batch; how far it is is shown meanwhile."""
        pace = Pace(what, self.scheduler.progress(batch_id)[1])
        before = self._keeper.num_tokens

        def line() -> str:
            done, _ = self.scheduler.progress(batch_id)
            return pace.line(done, self._keeper.num_tokens - before)

        async with showing(pace, self.show, self.logger, line):
            return await self.scheduler.collect(
                batch_id, min_ratio=min_ratio, wait_after_min_s=wait_after_min_s
            )

    def _refuse_endless_failure(self, result: BatchResult) -> None:
        """End a run in which step after step no task at all succeeds.

        Raises:
            RuntimeError: With what the last task failed of.
        """
        failed = [status for status in result.statuses if not status.ok]
        is_all = bool(failed) and len(failed) == len(result.statuses)
        self._failed_steps = self._failed_steps + 1 if is_all else 0
        if is_all:
            self._last_failure = failed[-1].message
        if self._failed_steps >= _MAX_FAILED_STEPS:
            raise self._failure(f"{self._failed_steps} steps in a row")

    def _refuse_failure_throughout(self, num_steps: int) -> None:
        """End a run that was too short for `_refuse_endless_failure`, and in which all failed.

        Raises:
            RuntimeError: With what the last task failed of.
        """
        if num_steps and self._failed_steps == num_steps and not self._is_stopping:
            steps = "the only step" if num_steps == 1 else f"all {num_steps} steps"
            raise self._failure(f"{steps} of this run")

    def _refuse_long_prompts_alone(self) -> None:
        """End a run whose experiences are all stand-ins for prompts that were too long.

        Raises:
            RuntimeError: Says so.
        """
        if self._num_cut and not self._num_sampled and not self._is_stopping:
            raise RuntimeError(
                "Nothing was sampled: all prompts of this run are longer than "
                "model.max_prompt_tokens. Raise it, or shorten them."
            )

    def _failure(self, where: str) -> RuntimeError:
        return RuntimeError(
            f"All tasks failed in {where}; see explorer.log and explorer_runner_*.log. "
            f"The last one: {self._last_failure}"
        )

    def _rollout_metrics(self, result: BatchResult, seconds: float) -> Metrics:
        """The scheduler's metrics of the batch, and what the explorer alone knows."""
        lengths = [
            {"prompt_length": e.prompt_length, "response_length": int(e.action_mask.sum())}
            for e in result.experiences
            if e.action_mask is not None
        ]
        tokens = sum(row["response_length"] for row in lengths)
        return (
            result.metrics
            | summarize(lengths, "rollout")
            | {
                "rollout/model_version": float(self.version),
                "rollout/experience_count": float(len(result.experiences)),
                "rollout/response_tokens": float(tokens),
                "rollout/tokens_per_second": tokens / max(seconds, 1e-9),
            }
        )

    async def _write(self, result: BatchResult, metrics: Metrics) -> None:
        with timed(metrics, "experience_pipeline/time/total"):
            found = await self.sink.process(result.experiences)
        self.tasks.feedback(found)
        metrics |= numbers(found)
        metrics |= self.tasks.metrics()
        self._finished_state = {"latest_iteration": self.step, "tasks": self.tasks.state_dict()}

    async def _sync_if_due(self, metrics: Metrics) -> bool:
        """Take new weights if the schedule says so; False if the trainer has ended."""
        if not self.schedule.is_explorer_due(self.step):
            return True
        with timed(metrics, "explorer/time/wait_explore_step"):
            ticket, is_open = await self._due_ticket()
        if ticket is not None:
            with timed(metrics, "explorer/time/sync_weight"):
                await self.load(ticket)
            now = time.perf_counter()
            metrics["explore/time/sync_interval"] = now - self._synced_at
            self._synced_at = now
        return is_open

    async def _due_ticket(self) -> tuple[WeightTicket | None, bool]:
        """The weights to take now, if any, and whether the trainer still runs."""
        timeout_s = self.settings.sync_timeout_s
        if self.schedule.style is SyncStyle.EXPLORER_DRIVEN:
            ticket = await self.board.ask(self.version, timeout_s)
            return ticket, ticket is not None or await self.board.is_open()
        if self.schedule.style is not SyncStyle.FIXED:
            version, newest = await self.board.newest()
            return (newest if version > self.version else None), True
        async with self._showing_the_wait():
            schedule = self.schedule.beside(await self.board.trainer_rhythm(timeout_s))
        due = schedule.version_due(self.step)
        if due is None or due <= self.version:
            return None, True
        await self.sink.flush(due)
        await self._rest()
        async with self._showing_the_wait():
            ticket = await self.board.wait_newer(due - 1, timeout_s)
        if ticket is None:
            await self._wake()
        return ticket, ticket is not None

    def _showing_the_wait(self) -> AbstractAsyncContextManager[None]:
        pace = Pace(f"step {self.step}: {self.settings.waits_for}")
        return showing(pace, self.show, self.logger)

    async def _rest(self) -> None:
        """Leave the GPUs to the trainer, if it shares them: new weights end it, or `_wake`."""
        if self.settings.shares_gpus:
            await self._keeper.rest()

    async def _wake(self) -> None:
        if self.settings.shares_gpus:
            await self._keeper.wake()

    async def take_newest_weights(self) -> None:
        """Bring the engines to the newest published weights, at the start and after a restart."""
        version, ticket = await self.board.newest()
        if ticket is not None and version > self.version:
            await self.load(ticket)
        self.version = max(self.version, version)

    async def load(self, ticket: WeightTicket) -> None:
        """Give every engine the weights and compare what it then runs with what was sent.

        Raises:
            RuntimeError: An engine runs something else than the trainer sent.
        """
        start = time.perf_counter()
        ticket, digests = await self._loaded(ticket)
        for index, digest in enumerate(digests):
            if ticket.digest and digest != ticket.digest:
                raise RuntimeError(
                    f"Engine {index} runs weights with digest {digest} after the sync of version "
                    f"{ticket.version}, but the trainer sent {ticket.digest}: the sync failed."
                )
        self.version = ticket.version
        seconds = time.perf_counter() - start
        for logger in (self.logger, get_logger("synchronizer")):
            logger.info("Weights of version %d loaded in %.3f s.", ticket.version, seconds)

    async def _loaded(self, ticket: WeightTicket) -> tuple[WeightTicket, list[str]]:
        """Have the engines load; newer weights where the trainer has dropped these meanwhile."""
        while True:
            try:
                return ticket, await self._keeper.load(ticket)
            except FileNotFoundError:
                _, newest = await self.board.newest()
                if newest is None or newest.version <= ticket.version:
                    raise
                ticket = newest

    async def _evaluate_if_due(self) -> None:
        """Not after the last step: what `_finish` evaluates may be newer."""
        every = self.settings.eval_interval
        if every and self.step % every == 0 and not self._is_done():
            await self.evaluate()

    async def evaluate(self) -> Metrics:
        """Run every evaluation set once with the weights in place; report and return its scores."""
        metrics: Metrics = {}
        if not self.evals or self._evaluated == (self.step, self.version):
            return metrics
        self._evaluated = self.step, self.version
        prefix = self.settings.metric_prefix
        with timed(metrics, f"time/{prefix}"):
            for taskset in self.evals:
                batch_id = f"{self.step}/{taskset.name}"
                self.scheduler.submit(batch_id, list(taskset.tasks))
                result = await self._collect(batch_id, f"evaluating {taskset.name}")
                self._note_failures(taskset.name, result.statuses)
                scores = summarize_eval(result.statuses, detailed=self.settings.detailed_stats)
                metrics |= prefix_metrics(scores, f"{prefix}/{taskset.name}")
        self.report(prefix, self.step, metrics)
        self.logger.info("Evaluation at step %d: %s", self.step, metrics)
        return metrics

    def _note_failures(self, name: str, statuses: Sequence[TaskStatus]) -> None:
        """Say that an evaluation has no score at all: its metrics alone would not."""
        self._num_evaluated += sum(status.ok for status in statuses)
        if statuses and not any(status.ok for status in statuses):
            self._last_failure = statuses[-1].message
            told = "Evaluation of %s: all tasks failed. The last one: %s"
            self.logger.warning(told, name, self._last_failure)

    def refuse_evaluations_without_a_score(self) -> None:
        """End a run that only evaluates, and in which all tasks failed.

        Raises:
            RuntimeError: With what the last task failed of.
        """
        if self._last_failure and not self._num_evaluated and not self._is_stopping:
            raise self._failure("every evaluation of this run")

    async def _finish(self) -> None:
        """Close the writer, take the trainer's last weights and evaluate them."""
        await self.sink.close()
        if self.settings.has_trainer:
            await self._take_last_weights()
        if self.settings.eval_interval and not self._is_stopping:
            await self.evaluate()

    async def _take_last_weights(self) -> None:
        ticket: WeightTicket | None = None
        await self._rest()
        while not self._is_stopping:
            newer = await self._newer(self.version if ticket is None else ticket.version)
            if newer is None:
                break
            ticket = newer
        if ticket is not None:
            await self.load(ticket)
        await self._wake()

    async def _newer(self, than: int) -> WeightTicket | None:
        """The trainer's next weights, None at its end; it may make many steps before it sends any.

        Raises:
            TimeoutError: It made no step either.
        """
        while not await self.board.is_over():
            num_steps = self.trainer_steps()
            try:
                return await self.board.wait_newer(than, self.settings.sync_timeout_s)
            except TimeoutError:
                if self.trainer_steps() == num_steps:
                    raise
        version, newest = await self.board.newest()
        return newest if version > than else None

    def state_dict(self) -> dict[str, object]:
        """Where a resumed explorer goes on: after the last step whose experiences are written."""
        return self._finished_state or {
            "latest_iteration": self.step,
            "tasks": self.tasks.state_dict(),
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on after the step of ``state``."""
        self.step = int(state["latest_iteration"])  # type: ignore[call-overload]  # from state_dict
        self.tasks.load_state_dict(state["tasks"])  # type: ignore[arg-type]  # from state_dict
        self._finished_state = state

    async def close(self) -> None:
        """End runners and engines."""
        await self.scheduler.close()
        await asyncio.gather(*(e.close() for e in self.engines), return_exceptions=True)


def _num_cut(result: BatchResult) -> int:
    """Stand-ins for prompts that were too long to be answered."""
    return sum(e.truncate_status == "prompt_truncated" for e in result.experiences)
