"""RunPlan -> the parts of one stage, wired together. Only here do classes and processes meet."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from logging import Logger

from trinity.algorithm import ALGORITHM_TYPE
from trinity.common.config import Config
from trinity.common.config.arithmetic import rollouts_per_step
from trinity.common.constants import Mode
from trinity.common.deadlines import together, within
from trinity.common.models.protocol import InferenceEngine
from trinity.explorer.benchmark import Benchmark
from trinity.explorer.engine_keeper import START_TIMEOUT_S
from trinity.explorer.explorer import Explorer
from trinity.launcher import build_explorer, build_trainer
from trinity.launcher.buffers import Buffers, open_buffers
from trinity.launcher.job import JobCheckpoints, ResumePoint
from trinity.launcher.plan import RunPlan
from trinity.launcher.reporter import Report, Reporter
from trinity.synchronizer.board import Board, VersionBoard
from trinity.synchronizer.file_board import FileBoard
from trinity.synchronizer.schedule import TrainerRhythm
from trinity.trainer.trainer import Trainer
from trinity.utils.actor import ProcessDied
from trinity.utils.log import get_logger
from trinity.utils.monitor import MONITOR
from trinity.utils.progress import Show


@dataclass
class Parts:
    """The parts of one stage. ``run``, then ``close`` whatever happened.

    Args:
        end_timeout_s: Seconds each part may take to end by itself, a save under way included;
            then its processes are killed.
        starts_in_turn: Engines first, then the trainer: an engine measures the GPU they share.
    """

    board: Board
    buffers: Buffers
    explorer: Explorer | None
    trainer: Trainer | None
    reporters: list[Reporter]
    total_steps: int | None
    auxiliary: Sequence[InferenceEngine] = ()
    benchmark: Benchmark | None = None
    end_timeout_s: float = 60.0
    starts_in_turn: bool = False
    logger: Logger = field(default_factory=lambda: get_logger("launcher"))
    _explorer_task: asyncio.Task[None] | None = None
    _is_stopping: bool = False

    async def run(self, resume: ResumePoint | None) -> None:
        """Start everything side by side, then run explorer and trainer to their end.

        The first error of either ends the other and is raised. Where `stop` comes before all is
        ready, nothing is explored.
        """
        self._restore(resume)
        await self._prepare(resume)
        tasks = []
        if self.explorer is not None and not self._is_stopping:
            self._explorer_task = asyncio.create_task(self._explore())
            tasks.append(self._explorer_task)
        if self.trainer is not None:
            tasks.append(asyncio.create_task(self._train(self.trainer)))
        if tasks:
            await together(*tasks)

    def stop(self) -> None:
        """Give up rollouts under way; the trainer ends after its step and saves."""
        self._is_stopping = True
        if self.explorer is not None:
            self.explorer.stop()
        if self._explorer_task is not None:
            self._explorer_task.cancel()
        if self.trainer is not None:
            self.trainer.stop()

    def shortfall(self) -> str | None:
        """What is said where the experiences ended before the trainer's last step; None else."""
        step = self.trainer.step if self.trainer is not None else None
        if self._is_stopping or step is None or step >= (self.total_steps or 0):
            return None
        return (
            f"The experiences ended after step {step} of {self.total_steps}: fewer came than that "
            "many steps need."
        )

    async def close(self) -> None:
        """End all processes of the stage."""
        waits = [(self.buffers.close(), "the buffers")]
        if self.explorer is not None:
            waits.append((self.explorer.close(), "the explorer"))
        if self.trainer is not None:
            waits.append((self.trainer.close(), "the trainer"))
        waits += [(engine.close(), "an auxiliary model") for engine in self.auxiliary]
        ends = [within(self.end_timeout_s, wait, who, "the end") for wait, who in waits]
        for outcome in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(outcome, ProcessDied):
                self.logger.info("While closing: %s", outcome)
            elif isinstance(outcome, BaseException):
                self.logger.warning("While closing: %s: %s", type(outcome).__name__, outcome)
        build_explorer.kill_engines(self.explorer, self.auxiliary)
        build_trainer.kill_engine(self.trainer)
        for reporter in self.reporters:
            reporter.close()

    def _restore(self, resume: ResumePoint | None) -> None:
        if resume is None or self.benchmark is not None:
            return
        for part, name in ((self.trainer, "trainer"), (self.explorer, "explorer")):
            state = resume.state(name)
            if part is not None and state is not None:
                part.load_state_dict(state)
        self.buffers.restore(resume)

    async def _prepare(self, resume: ResumePoint | None) -> None:
        waits = [_within_start(self.buffers.prepare(), "the buffers")]
        if self.explorer is not None and self.starts_in_turn:
            await self.explorer.prepare()
        elif self.explorer is not None:
            waits.append(self.explorer.prepare())
        if self.trainer is not None:
            folder = resume.folder if resume else None
            waits.append(_within_start(self.trainer.prepare(folder), "the trainer"))
        for index, engine in enumerate(self.auxiliary):
            waits.append(_within_start(engine.prepare(), f"engine {index} of auxiliary models"))
        has_lost_weights = False
        if self.trainer is not None:
            has_lost_weights = await self.board.reopen(self.trainer.step)
        await together(*waits)
        if resume is None or self.trainer is None:
            return
        if self.explorer is not None or has_lost_weights:
            await self.trainer.publish({})

    async def _train(self, trainer: Trainer) -> None:
        """Train to the end; from then on nobody reads what the explorer writes."""
        await trainer.run()
        if self.explorer is not None:
            self.explorer.end_after_step()
        await self.buffers.stop_reading()

    async def _explore(self) -> None:
        assert self.explorer is not None
        try:
            await self.explorer.watching((self.benchmark or self.explorer).run())
        except asyncio.CancelledError:
            if not self._is_stopping:
                raise
            await self.buffers.stop_writing()


async def _within_start(wait: Awaitable[None], who: str) -> None:
    await within(START_TIMEOUT_S, wait, who, "the start", "Its log says how far it came.")


def build_parts(
    plan: RunPlan,
    resume: ResumePoint | None,
    listeners: Sequence[Report],
    say: Callable[[str], None],
    show: Show = lambda text, is_to_stay: None,
) -> Parts:
    """The parts of a stage. Nothing is started yet.

    Args:
        resume: The checkpoint to go on from, if any.
        listeners: Get every report of every part.
        say: Shows a line to the person at the screen.
        show: Shows what is under way there.
    """
    config, buffers, board = plan.config, open_buffers(plan, say), _board(plan)
    reporters = Reporters(config, listeners)
    explorer: Explorer | None = None
    auxiliary: list[InferenceEngine] = []
    if config.mode.explores:
        reporter = reporters.of("benchmark" if config.mode is Mode.BENCH else "explorer")
        explorer, auxiliary = build_explorer.build(plan, board, buffers, reporter, say, show)
    trainer: Trainer | None = None
    if config.mode.trains:
        trainer = _trainer(plan, board, buffers, explorer, reporters.of("trainer"), show)
    if explorer is not None and trainer is not None:
        explorer.trainer_steps = partial(getattr, trainer, "step")
    return Parts(
        board,
        buffers,
        explorer,
        trainer,
        reporters.made,
        _total_steps(config, buffers),
        auxiliary,
        _benchmark(plan, explorer),
        starts_in_turn=plan.is_colocated,
    )


class Reporters:
    """Makes the reporter of each part; ``made`` are all of them."""

    def __init__(self, config: Config, listeners: Sequence[Report]) -> None:
        self._config = config
        self._listeners = listeners
        self._log_names = {"explorer": config.explorer.name, "trainer": config.trainer.name}
        self.made: list[Reporter] = []

    def of(self, role: str) -> Reporter:
        config = self._config
        make = MONITOR.get(config.monitor.monitor_type)
        monitor = make(config.project, config.group, config.name, role, config)
        logger = get_logger(self._log_names.get(role, role))
        self.made.append(Reporter(monitor, self._listeners, logger))
        return self.made[-1]


def _trainer(
    plan: RunPlan,
    board: Board,
    buffers: Buffers,
    explorer: Explorer | None,
    reporter: Reporter,
    show: Show,
) -> Trainer:
    """The trainer, whose checkpoints hold the state of all parts."""
    checkpoints = JobCheckpoints(plan.job, plan.config.trainer.max_checkpoints_to_keep)
    total = buffers.total_train_steps(plan.config)
    trainer = build_trainer.build(plan, board, buffers, checkpoints, reporter, total, show)
    checkpoints.parts = {"trainer": trainer.state_dict}
    if explorer is not None:
        checkpoints.parts["explorer"] = explorer.state_dict
    checkpoints.files = buffers.snapshot
    return trainer


def _benchmark(plan: RunPlan, explorer: Explorer | None) -> Benchmark | None:
    if plan.config.mode is not Mode.BENCH or explorer is None:
        return None
    from trinity.launcher import build_bench

    return build_bench.build(plan, explorer)


def _board(plan: RunPlan) -> Board:
    """One board in this process, or files where explorer and trainer run in two commands."""
    algorithm = ALGORITHM_TYPE.get(plan.config.algorithm.algorithm_type)
    is_alone = plan.config.mode in (Mode.EXPLORE, Mode.TRAIN) and algorithm.schema == "experience"
    if not is_alone:
        return VersionBoard()
    if not plan.config.mode.trains:
        return FileBoard(plan.job.weights)
    rows = rollouts_per_step(plan.config)
    return FileBoard(plan.job.weights, TrainerRhythm(rows, plan.schedule.publication_interval))


def _total_steps(config: Config, buffers: Buffers) -> int | None:
    if config.mode.trains:
        return buffers.total_train_steps(config)
    return buffers.total_explore_steps(config)
