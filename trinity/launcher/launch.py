"""RunPlan -> running parts -> their end: every stage of a job, its screen and its summary."""

import asyncio
import math
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from trinity.buffer.pipelines.task import run_task_pipeline, tenths
from trinity.checkpoint import huggingface, layout
from trinity.common.config import Config, iterate_stages
from trinity.common.constants import Mode
from trinity.common.errors import ConfigError, Problem, TrinityError
from trinity.launcher.check_bench import bench_problems
from trinity.launcher.check_gpus import gpu_problems
from trinity.launcher.check_trainer import trainer_problems
from trinity.launcher.checks import find_start_problems, located
from trinity.launcher.cluster import gpus_in_cluster, ray_cluster
from trinity.launcher.compile_ahead import compiling_ahead
from trinity.launcher.evaluation_plan import evaluation_lines
from trinity.launcher.follow import saying
from trinity.launcher.gpu_needs import joined_gpus
from trinity.launcher.job import (
    JobFolder,
    ResumePoint,
    StageLog,
    find_resume_point,
    lost_checkpoints,
    lost_stage,
    named_anew,
)
from trinity.launcher.lock import job_lock
from trinity.launcher.memory_watch import MemoryWatch
from trinity.launcher.plan import RunPlan, make_plan
from trinity.launcher.plan_text import show_plan
from trinity.launcher.reporter import Report
from trinity.launcher.screen import Screen
from trinity.launcher.service_env import service_variables
from trinity.launcher.summary import RunSummary, StageRecorder, StageSummary
from trinity.utils.log import get_logger

if TYPE_CHECKING:
    from trinity.launcher.build import Parts

_ALL_LOGS = "RAY_DEDUP_LOGS"  # "0" asks Ray for all lines of all processes
_EXIT_INTERRUPTED = 130
_END_IS_LONG_S = 3.0
_HURRIED_END_S = 3.0  # after a second Ctrl-C


class RunFailedError(TrinityError):
    """A run that ended by an error nobody raised on purpose; the text is its first cause."""


@dataclass
class Job:
    """All stages of one configuration. ``run`` gives the exit code.

    Args:
        config: As loaded, with command-line overrides in it.
        plugin_dirs: Folders of plugins, loaded already in this process.
        screen: Where a person watches.
        listeners: Get every report of every part, besides the screen and the summary.
        observe: Entered with the parts of each stage before they start, left before they close.
    """

    config: Config
    plugin_dirs: Sequence[str] = ()
    screen: Screen = field(default_factory=Screen)
    plans: list[RunPlan] = field(default_factory=list)
    listeners: Sequence[Report] = ()
    observe: Callable[["Parts"], AbstractAsyncContextManager[None]] = lambda parts: nullcontext()
    _is_interrupted: bool = False

    def plan(self) -> None:
        """Settle every stage's facts and find all that would stop the run.

        Raises:
            ConfigError: All problems of all stages, before anything is started or written.
            NotEnoughGpusError: More GPUs are asked for than this machine has.
        """
        found = joined_gpus(self.config)
        self.config = named_anew(self.config)
        stages = list(iterate_stages(self.config))
        self.plans = [make_plan(c, name, self.plugin_dirs, found) for name, c in stages]
        problems: dict[tuple[str, str], Problem] = {}
        for index, plan in enumerate(self.plans):
            found_problems = [
                *find_start_problems(plan.config),
                *trainer_problems(plan),
                *bench_problems(plan),
                *gpu_problems(plan),
                *self._checkpoint_problems(index, plan),
            ]
            for problem in found_problems:
                problems.setdefault((problem.key, problem.message), problem)
        if problems:
            raise ConfigError(list(problems.values()), self.config.source.path)

    def _checkpoint_problems(self, index: int, plan: RunPlan) -> Iterator[Problem]:
        """Checkpoints that a stage was to go on from, or the next one to start from, and can't."""
        latest = StageLog(self.folder.path).latest() if self.config.stages else -1
        problem: Problem | None = None
        if index > latest and plan.config.mode is not Mode.BENCH:
            problem = lost_checkpoints(plan.job)
        elif index == latest < len(self.plans) - 1 and plan.config.mode.trains:
            problem = lost_stage(plan.stage, plan.job)
        if problem is not None:
            yield located(problem, plan.config)

    @property
    def folder(self) -> JobFolder:
        """The folder of the whole job: of its only stage, or the one above its stages."""
        path = self.plans[0].job.path
        return JobFolder(path.parent if self.config.stages else path)

    def run(self) -> int:
        """Run all stages that are not finished; the exit code of the process."""
        started = psutil.Process().create_time()
        self._create_folder()
        summary = RunSummary(self.config.project, self.config.name, str(self.folder.path))
        with ExitStack() as stack:
            for role in self._roles():
                stack.enter_context(job_lock(self.folder.path, role))
            memory = stack.enter_context(MemoryWatch())
            self._save_config()
            if os.environ.get(_ALL_LOGS) == "0":
                logs = dict.fromkeys(Path(plan.config.log.save_dir) for plan in self.plans)
                stack.enter_context(saying(logs, self.screen.say))
            os.environ.update(self.plans[0].env_vars)  # what fails from here on has its log
            stack.enter_context(_terminating_as_ctrl_c())
            self._write(summary)
            try:
                asyncio.run(self._run_stages(summary, started))
                summary.status = "interrupted" if self._is_interrupted else "finished"
            except KeyboardInterrupt:
                summary.status = "interrupted"
                self.screen.say("Stopped.", "yellow")
                raise
            except BaseException as error:
                summary.status, summary.error = "failed", f"{type(error).__name__}: {error}"
                get_logger("launcher").info("The run failed.", exc_info=error)
                raise _shown(error, self.plans[0].job.log) from error
            finally:
                self.screen.end_stage()
                summary.seconds = time.time() - started
                summary.peak_memory_mb = memory.peak_mb
                self._write(summary)
        self.screen.final_table(summary, self._hints(summary))
        return _EXIT_INTERRUPTED if self._is_interrupted else 0

    def _write(self, summary: RunSummary) -> None:
        """Keep the summary; a disk without room for it must not hide what ended the run."""
        try:
            summary.write(self.folder.path)
        except OSError as error:
            why = error.strerror or error
            self.screen.say(f"summary.json can't be written: {why}. It is not of this run.", "red")

    def _create_folder(self) -> None:
        try:
            self.folder.create()
        except OSError as error:
            message = f"{self.folder.path} can't be made: {error.strerror or error}."
            fix = "Name another folder, or set TRINITY_CHECKPOINT_ROOT_DIR."
            key = "checkpoint_root_dir"
            line = self.config.source.line(key)
            problem = Problem(key, message, fix, self.config.checkpoint_root_dir or None, line)
            raise ConfigError([problem], self.config.source.path) from error

    def _roles(self) -> list[str]:
        """What of the job this process runs: two terminals may share a job by role."""
        modes = {plan.config.mode for plan in self.plans}
        roles = []
        if any(mode.explores for mode in modes):
            roles.append("benchmark" if modes == {Mode.BENCH} else "explorer")
        if any(mode.trains for mode in modes):
            roles.append("trainer")
        return roles

    def _save_config(self) -> None:
        self.config.save(self.folder.path / "config.yaml")
        for plan in self.plans:
            plan.job.create()
            plan.config.save(plan.job.path / "resolved_config.yaml")

    async def _run_stages(self, summary: RunSummary, started: float) -> None:
        first = self.plans[0]
        address = first.config.cluster.ray_address
        timeline: Path | None = None
        if first.config.monitor.enable_ray_timeline:
            timeline = self.folder.monitor / "timeline.json"
        of_services = service_variables(plan.config for plan in self.plans)
        cluster = ray_cluster(address, first.namespace, first.env_vars, timeline, of_services)
        with cluster as is_local, _terminating_as_ctrl_c(), compiling_ahead(self.plans):
            await asyncio.sleep(0)  # a Ctrl-C meanwhile ends the run here
            if not is_local:
                found = gpus_in_cluster()
                self.plans = [
                    make_plan(plan.config, plan.stage, self.plugin_dirs, found)
                    for plan in self.plans
                ]
            self._check_methods()
            await self._run_in_turn(summary, started)

    def _check_methods(self) -> None:
        """Refuse arguments that methods and operators don't take, in all stages before the first.

        Raises:
            ConfigError: With all of them.
        """
        from trinity.launcher.check_methods import method_problems  # imports PyTorch

        found = {
            problem.key: located(problem, plan.config)
            for plan in self.plans
            for problem in method_problems(plan.config)
        }
        if found:
            raise ConfigError(list(found.values()), self.config.source.path)

    async def _run_in_turn(self, summary: RunSummary, started: float) -> None:
        """Run each stage that was not finished before, from the model of the one before it."""
        done = StageLog(self.folder.path)
        latest = done.latest() if self.config.stages else -1
        model_path: str | None = None
        for index, plan in enumerate(self.plans):
            plan = _starting_from(plan, model_path)
            stage = _stage_summary(plan)
            summary.stages.append(stage)
            if index <= latest:
                stage.is_skipped = True
                steps = plan.config.buffer.total_steps
                self.screen.say(done.why_skipped(index, plan.stage, plan.job, steps))
            else:
                await self._run_stage(plan, index, stage, summary, started)
                if self._is_interrupted:
                    return
                if self.config.stages:
                    done.finish(index)
            model_path = _huggingface_folder(plan)
            stage.huggingface = model_path

    async def _run_stage(
        self,
        plan: RunPlan,
        index: int,
        stage: StageSummary,
        summary: RunSummary,
        started: float,
    ) -> None:
        from trinity.launcher.build import build_parts  # PyTorch: for a run that is not refused

        os.environ.update(plan.env_vars)
        logger = get_logger("launcher")
        for note in plan.notes:
            logger.info("Filled in: %s", note)
        await self._prepare_tasks(plan)
        recorder = StageRecorder(stage, started)
        is_bench = plan.config.mode is Mode.BENCH
        if plan.config.mode.trains:
            layout.end_saves(plan.job.path)
        resume = None if is_bench else find_resume_point(plan.job, logger.warning)
        if plan.config.mode.trains:
            layout.drop_torn(plan.job.path)
        listeners = [recorder.report, self.screen.report, *self.listeners]
        parts = build_parts(plan, resume, listeners, self.screen.say, self.screen.progress)
        self._announce(plan, parts, resume)
        title = f"stage {index + 1} of {len(self.plans)}: {plan.stage}" if plan.stage else "run"
        if resume is not None:
            stage.steps = resume.step
            title += f", resumed at step {resume.step}"
        self.screen.start_stage(title, stage, parts.total_steps)
        try:
            async with (
                _closing(parts, self.screen.say),
                self._stopping_on_signal(parts),
                self.observe(parts),
            ):
                await parts.run(resume)
                if short := parts.shortfall():
                    self.screen.say(short, "yellow")
        finally:
            recorder.end()
            self.screen.end_stage()
            with suppress(OSError):  # told of at the end of the run
                summary.write(self.folder.path)

    def _announce(self, plan: RunPlan, parts: "Parts", resume: ResumePoint | None) -> None:
        """Say what the stage will do."""
        total, say = parts.total_steps, self.screen.say
        show_plan(plan, self.screen, total)
        for line in evaluation_lines(plan, parts.buffers.evals, total, resume is not None):
            say(line)
        if resume is not None and resume.step >= (total or math.inf):
            say(
                f"Step {resume.step} was the last one, and it was reached before. To go on, raise "
                "buffer.total_steps; to begin anew, set continue_from_checkpoint=false.",
                "yellow",
            )

    async def _prepare_tasks(self, plan: RunPlan) -> None:
        """Run the task pipeline of a stage, if it has one whose result is not there yet."""
        pipeline = plan.config.data_processor.task_pipeline
        if pipeline is None or plan.config.mode is Mode.BENCH:
            return
        output = pipeline.output.path if pipeline.output is not None else None
        if not output:
            raise ConfigError([Problem("data_processor.task_pipeline.output", "It has no path.")])
        service, report = plan.config.service.data_juicer, tenths(self.screen.say)
        metrics = await run_task_pipeline(pipeline, service, output, report)
        found = [f"{key.partition('/')[2]} {value:g}" for key, value in metrics.items()]
        self.screen.say(f"Task pipeline: {', '.join(found) or 'its result is there already'}.")

    @asynccontextmanager
    async def _stopping_on_signal(self, parts: "Parts") -> AsyncIterator[None]:
        """First Ctrl-C: finish the step under way and save. Second: stop at once."""
        loop = asyncio.get_running_loop()
        running = asyncio.current_task()
        trains = parts.trainer is not None

        def stop() -> None:
            if self._is_interrupted and running is not None:
                parts.end_timeout_s = _HURRIED_END_S
                running.cancel()
                return
            self._is_interrupted = True
            first = ": the training step under way is finished and saved" if trains else ""
            self.screen.say(f"Stopping{first}. Press Ctrl-C again to stop at once.", "yellow")
            parts.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        try:
            yield
        except asyncio.CancelledError:
            if not self._is_interrupted:
                raise
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            signal.signal(signal.SIGTERM, _end_by_signal)

    def _hints(self, summary: RunSummary) -> list[tuple[str, str]]:
        """Where things are and what to try next."""
        hints = [("job", str(self.folder.path))]
        models = [stage.huggingface for stage in summary.stages if stage.huggingface]
        if models:
            hints.append(("model", models[-1]))
        if self.config.monitor.monitor_type == "tensorboard":
            hints.append(("look", f"tensorboard --logdir {self.folder.path}"))
        hints.append(("logs", self.plans[-1].config.log.save_dir))
        has_checkpoint = any(layout.find_latest(plan.job.path).folder for plan in self.plans)
        if self._is_interrupted and self.plans[0].config.continue_from_checkpoint:
            begins = "goes on from the last checkpoint" if has_checkpoint else "begins anew"
            hints.append(("next", f"the same command {begins}"))
        elif models:
            hints.append(
                ("next", "load it: transformers.AutoModelForCausalLM.from_pretrained(<model>)")
            )
        return hints


@contextmanager
def _terminating_as_ctrl_c() -> Iterator[None]:
    """Have a SIGTERM end all that was started, also where no step is under way to be finished.

    Ray sets its own, which does not.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = signal.signal(signal.SIGTERM, _end_by_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_by_signal(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _shown(error: BaseException, log: Path) -> BaseException:
    """What a person sees of an error that ended the run: its text, and where the rest stands."""
    if isinstance(error, TrinityError) or not isinstance(error, Exception):
        return error
    return RunFailedError(
        f"{type(error).__name__}: {error}\nThe traceback is in {log}/launcher.log."
    )


def _starting_from(plan: RunPlan, model_path: str | None) -> RunPlan:
    """``plan`` with the model that the stage before left behind."""
    if model_path is None:
        return plan
    config = plan.config.model_copy(deep=True)
    before = config.model.model_path
    config.model.model_path = model_path
    if config.explorer.rollout_model.model_path == before:
        config.explorer.rollout_model.model_path = model_path
    if config.model.critic_model_path == before:
        config.model.critic_model_path = model_path
    return replace(plan, config=config)


def _stage_summary(plan: RunPlan) -> StageSummary:
    mode = plan.config.mode
    algorithm = None if mode is Mode.BENCH else plan.config.algorithm.algorithm_type
    return StageSummary(plan.stage or "run", algorithm, str(mode))


def _huggingface_folder(plan: RunPlan) -> str | None:
    """The Hugging Face model of the newest checkpoint of a stage, or None."""
    found = layout.find_latest(plan.job.path).folder
    if found is None:
        return None
    folder = found / layout.ACTOR / layout.HUGGING_FACE
    return str(folder) if huggingface.has_weights(folder) else None


@asynccontextmanager
async def _closing(parts: "Parts", say: Callable[[str, str], None]) -> AsyncIterator[None]:
    """End ``parts`` with the block. Where that takes long after an error, the error is said first:
    a part that hangs is given its time to end."""
    loop, told = asyncio.get_running_loop(), None
    try:
        yield
    except Exception as error:
        limit = f"Ending all parts ({parts.end_timeout_s:.0f} s at most)."
        text = f"{type(error).__name__}: {error}\n{limit}"
        told = loop.call_later(_END_IS_LONG_S, say, text, "red")
        raise
    finally:
        await parts.close()
        if told is not None:
            told.cancel()


def run_config(
    config: Config,
    plugin_dirs: Sequence[str] = (),
    screen: Screen | None = None,
    is_dry: bool = False,
) -> int:
    """Plan and run ``config``; the exit code. ``is_dry`` shows the plans and starts nothing."""
    job = Job(config, plugin_dirs, screen or Screen())
    job.plan()
    if is_dry:
        for plan in job.plans:
            show_plan(plan, job.screen)
        return 0
    return job.run()
