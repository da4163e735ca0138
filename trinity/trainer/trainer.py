"""The update loop: experiences from the buffer, gradient steps, new weights out, checkpoints."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from trinity.algorithm.kl_fn.base import KLFn
from trinity.checkpoint.atomic import Content
from trinity.common.constants import SyncStyle
from trinity.common.experience import Experience
from trinity.synchronizer.board import Board
from trinity.synchronizer.schedule import SyncSchedule
from trinity.trainer.batch import TrainBatch
from trinity.trainer.cost import StepCost
from trinity.trainer.engine import TrainEngine
from trinity.trainer.preparation import Preparation
from trinity.trainer.update import Updater
from trinity.utils.log import get_logger
from trinity.utils.metrics import Metrics
from trinity.utils.progress import Pace, Show, showing
from trinity.utils.timer import timed

Report = Callable[[str, int, Metrics], None]
Sample = tuple[list[Experience], Metrics, list[dict[str, object]]]


class ExperienceSource(Protocol):
    """What the trainer reads from: a sample strategy (`trinity.algorithm.sample_strategy`)."""

    async def sample(self, step: int) -> Sample:
        """Experiences of one step, metrics, rows worth showing; StopAsyncIteration at the end."""
        ...

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: dict[str, object]) -> None: ...


class Checkpoints(Protocol):
    """Where checkpoints go, and what belongs to one besides the engine's state."""

    def folder(self, step: int) -> str:
        """``<job>/global_step_<step>``."""
        ...

    def snapshot(self) -> dict[str, Content]:
        """Files, by name, with all that is not in the engine: steps, data position, unread rows.

        All is as of now; what takes long to write out is a call for another thread.
        """
        ...

    def complete(self, step: int) -> None:
        """The checkpoint of ``step`` is on disk: point to it, drop old ones."""
        ...


@dataclass(frozen=True)
class TrainerSettings:
    """How long and how often.

    Args:
        total_steps: Steps to train; None: until the experiences end.
        save_interval: Steps between two checkpoints; 0: only at the end.
        save_hf: When weights are also saved in Hugging Face format.
        on_save_error: Whether a failed save ends the run; at the end of the run it always does.
        enable_preview: Log sampled rows as a table at every sync interval.
        publishes_weights: Whether an explorer takes the weights (any mode but pure training).
    """

    total_steps: int | None = None
    save_interval: int = 0
    save_hf: Literal["last", "always", "never"] = "last"
    on_save_error: Literal["continue", "stop"] = "stop"
    enable_preview: bool = False
    publishes_weights: bool = True


@dataclass
class Trainer:
    """Trains step by step. ``prepare`` -> ``run`` -> ``close``; collaborators may be stand-ins.

    ``show`` gets a line while experiences are waited for; None where an explorer tells enough.
    """

    engine: TrainEngine
    source: ExperienceSource
    preparation: Preparation
    updater: Updater
    board: Board
    schedule: SyncSchedule
    checkpoints: Checkpoints
    settings: TrainerSettings
    cost: StepCost = field(default_factory=StepCost)
    report: Report = lambda role, step, metrics: None
    report_rows: Callable[[str, list[dict[str, object]], int], None] = lambda name, rows, step: None
    show: Show | None = None
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("trainer"))
    step: int = 0
    _num_trained: int = 0
    _why_skipped: str = ""
    _published: int = 0
    _saving: asyncio.Task[None] | None = None
    _reading: "asyncio.Future[Sample] | None" = None
    _is_stopping: bool = False
    _preview: list[dict[str, object]] = field(default_factory=list)
    _step_ended_at: float = field(default_factory=time.perf_counter)
    _published_at: float = field(default_factory=time.perf_counter)

    async def prepare(self, resume_from: Path | None = None) -> None:
        """Start the engine; with ``resume_from``, go on from that checkpoint folder."""
        await self.engine.prepare()
        if resume_from is not None:
            await self.engine.load(str(resume_from))
            self._published = self.step
            self.logger.info("Resumed at step %d from %s.", self.step, resume_from)
        self._step_ended_at = self._published_at = time.perf_counter()

    async def run(self) -> None:
        """All steps, in order; then the last weights are published and saved.

        Raises:
            RuntimeError: No step had a token to train on.
        """
        while not self._is_done():
            metrics: Metrics = {}
            try:
                experiences = await self._read(metrics)
            except StopAsyncIteration:
                self.logger.info("No experiences left after step %d.", self.step)
                break
            self.step += 1
            await self._train(experiences, metrics)
            await self._publish_if_due(metrics)
            await self._save_if_due(metrics)
            self._report(metrics)
        await self._finish()

    def stop(self) -> None:
        """Start no further step; a wait for experiences ends."""
        self._is_stopping = True
        if self._reading is not None:
            self._reading.cancel()

    def _is_done(self) -> bool:
        total = self.settings.total_steps
        return self._is_stopping or (total is not None and self.step >= total)

    async def _read(self, metrics: Metrics) -> list[Experience]:
        self._reading = asyncio.ensure_future(self.source.sample(self.step + 1))
        try:
            async with self._showing_the_wait():
                await self._answer_while_reading(self._reading)
                experiences, found, rows = await self._reading
        except asyncio.CancelledError:
            self._reading.cancel()  # else it would go on to take experiences
            if self._is_stopping:
                raise StopAsyncIteration from None
            raise
        metrics |= found
        self._preview += rows if self.settings.enable_preview else []
        return experiences

    def _showing_the_wait(self) -> AbstractAsyncContextManager[None]:
        if self.show is None:
            return nullcontext()
        pace = Pace(f"step {self.step + 1}: waiting for experiences of an explorer (mode explore)")
        return showing(pace, self.show, self.logger)

    async def _answer_while_reading(self, reading: "asyncio.Future[Sample]") -> None:
        """Until experiences are there, give explorers that ask what was trained so far."""
        if self.schedule.style is not SyncStyle.EXPLORER_DRIVEN:
            return
        while not reading.done():
            asked = asyncio.ensure_future(self.board.wait_asked())
            waits: set[asyncio.Future[Any]] = {reading, asked}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            if reading.done() or not await self.board.is_asked():
                continue
            if self.settings.publishes_weights and self._published < self.step:
                await self.publish({})
            else:
                await self.board.decline()

    async def _train(self, experiences: list[Experience], metrics: Metrics) -> None:
        """One training step; a batch without a trained token changes nothing and says so."""
        self.logger.info("Step %d: %d experiences.", self.step, len(experiences))
        with timed(metrics, "time/train_step"):
            batch = TrainBatch.from_experiences(experiences) if experiences else None
            if batch is None or batch.num_trained_tokens == 0:
                metrics["actor/skipped_steps"] = 1.0
                self._why_skipped = why = _why_none_is_trained(experiences)
                self.logger.warning("Step %d has no token to train on: %s.", self.step, why)
                return
            batch = await self.preparation.complete(batch, metrics)
            await self.updater.update(batch, self.step, metrics)
            self._num_trained += 1
        metrics |= batch.summary()
        metrics |= self.cost.metrics(batch, metrics, await self.engine.health())
        metrics["sample/experience_count"] = float(len(experiences))
        metrics["sample/trained_tokens"] = float(batch.num_trained_tokens)
        metrics["response_length/clip_ratio"] = _share_of_cut(experiences)
        cut = [e.truncate_status == "prompt_truncated" for e in experiences]
        metrics["prompt_length/clip_ratio"] = sum(cut) / len(cut)

    async def _publish_if_due(self, metrics: Metrics) -> None:
        if not self.settings.publishes_weights:
            return
        is_asked = self.schedule.style is SyncStyle.EXPLORER_DRIVEN and await self.board.is_asked()
        if self.schedule.is_trainer_due(self.step, is_asked):
            await self.publish(metrics)

    async def publish(self, metrics: Metrics) -> None:
        """Send the weights of this step to whoever samples with them."""
        with timed(metrics, "time/sync_weight"):
            ticket = await self.engine.send_weights(self.step)
            await self.board.publish(ticket)
        now = time.perf_counter()
        metrics["time/trainer_sync_interval"] = now - self._published_at
        self._published, self._published_at = self.step, now
        for logger in (self.logger, get_logger("synchronizer")):
            logger.info("Weights of version %d are out.", self.step)

    async def _save_if_due(self, metrics: Metrics) -> None:
        every = self.settings.save_interval
        if every and self.step % every == 0:
            with timed(metrics, "time/save_checkpoint"):
                await self._save(is_last=False)

    async def _save(self, is_last: bool) -> None:
        """Save in the background; the last checkpoint is waited for.

        At most one save is under way: a new one waits for the one before.
        """
        await self._saved_before()
        rule = self.settings.save_hf
        with_hf = rule == "always" or (rule == "last" and is_last)
        folder, found = self.checkpoints.folder(self.step), self.checkpoints.snapshot()
        files = await asyncio.to_thread(_written, found)
        await self.engine.save(folder, hf=with_hf, files=files, is_last=is_last)
        self._saving = asyncio.create_task(self._complete(self.step))
        if is_last:
            await self._saved_before(is_last=True)

    async def _complete(self, step: int) -> None:
        await self.engine.wait_saved()
        await asyncio.to_thread(self.checkpoints.complete, step)
        self.logger.info("Checkpoint of step %d is complete.", step)

    async def _saved_before(self, is_last: bool = False) -> None:
        """Wait for the save under way, if any; an error ends the run if the settings say so."""
        saving = self._saving
        if saving is None:
            return
        try:
            await asyncio.shield(saving)  # where this wait is cancelled, `close` goes on with it
        except OSError as error:
            self.logger.error("A checkpoint could not be saved: %s", error)
            if self.settings.on_save_error == "stop" or is_last:
                raise
        finally:
            if saving.done():
                self._saving = None

    def _report(self, metrics: Metrics) -> None:
        now = time.perf_counter()
        metrics["time/step"] = metrics["perf/time_per_step"] = now - self._step_ended_at
        if "perf/total_num_tokens" in metrics:
            metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / metrics["time/step"]
        self._step_ended_at = now
        if self.step % self.schedule.publication_interval == 0:
            self._show_preview()
        self.report("trainer", self.step, metrics)
        self.logger.info("Step %d: %s", self.step, metrics)

    def _show_preview(self) -> None:
        """Log the rows kept since the last time as one table."""
        if self._preview:
            self.report_rows("rollout_examples", self._preview, self.step)
        self._preview = []

    async def _finish(self) -> None:
        """Publish and save what was trained since the last time, and say that no more will come."""
        self._show_preview()
        metrics: Metrics = {}
        try:
            if self.settings.publishes_weights and self._published < self.step:
                await self.publish(metrics)
        finally:
            await self.board.close(f"the trainer ended after step {self.step}")
        if self.step > 0 and not self._is_stopping:
            self._refuse_no_training()
        if self.step > 0:
            await self._save(is_last=True)

    def _refuse_no_training(self) -> None:
        """A job that trained nothing is not finished, and has no last checkpoint."""
        if self._num_trained == 0:
            steps = "its only step" if self.step == 1 else f"all of its {self.step} steps"
            last = f" The last one: {self._why_skipped}." if self._why_skipped else ""
            raise RuntimeError(
                f"Nothing was trained: {steps} had no token to train on.{last} Mend that, and "
                "begin anew (continue_from_checkpoint=false)."
            )

    def state_dict(self) -> dict[str, object]:
        """What ``trainer_meta.json`` keeps: step, position in the data, adaptive coefficients."""
        return {
            "latest_iteration": self.step,
            "trained_iterations": self._num_trained,
            "sample_strategy_state": self.source.state_dict(),
            "kl_state": {name: kl.state_dict() for name, kl in self._kl_fns().items()},
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on after the step of ``state``; call before `prepare`."""
        self.step = int(state["latest_iteration"])  # type: ignore[call-overload]  # from state_dict
        self._num_trained = int(state.get("trained_iterations", self.step))  # type: ignore[call-overload]  # from state_dict
        self.source.load_state_dict(state["sample_strategy_state"])  # type: ignore[arg-type]  # from state_dict
        kl_state: dict[str, dict[str, float]] = state.get("kl_state", {})  # type: ignore[assignment]  # from state_dict
        for name, kl in self._kl_fns().items():
            if name in kl_state:
                kl.load_state_dict(kl_state[name])

    def _kl_fns(self) -> dict[str, KLFn]:
        """The KL terms in force, whose coefficients may move."""
        found = {
            "loss": self.updater.objective.kl_loss_fn,
            "penalty": self.preparation.kl_penalty_fn,
        }
        return {name: kl for name, kl in found.items() if kl is not None}

    async def close(self) -> None:
        """Wait for a save under way and end the engine."""
        [failed] = await asyncio.gather(self._saved_before(), return_exceptions=True)
        await self.engine.close()
        if failed is not None:
            raise failed


def _written(files: Mapping[str, Content]) -> dict[str, str | bytes]:
    return {name: found() if callable(found) else found for name, found in files.items()}


def _why_none_is_trained(experiences: list[Experience]) -> str:
    """What a person should look at where a step has no token to train on."""
    if not experiences:
        return "all of its samples failed or were left out"
    total = len(experiences)
    cut = sum(e.truncate_status == "prompt_truncated" for e in experiences)
    if cut:
        return f"{cut} of its {total} prompts are longer than model.max_prompt_tokens"
    return f"all tokens of its {total} experiences are masked"


def _share_of_cut(experiences: list[Experience]) -> float:
    """Share of the responses that ended where no more tokens were allowed."""
    cut = [
        e.truncate_status == "response_truncated" or e.info.get("finish_reason") == "length"
        for e in experiences
    ]
    return sum(cut) / len(cut)
