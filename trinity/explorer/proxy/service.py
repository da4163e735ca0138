"""`Service`: an explorer's tasks and scheduler in one, where users make the rollouts.

A step of the explorer is then a commit: what users rewarded goes through the pipeline to the
trainer, and the engines take its new weights as in any other run.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trinity.checkpoint.atomic import write_text
from trinity.common.experience import Experience
from trinity.common.models.protocol import InferenceEngine
from trinity.common.workflows import Task
from trinity.explorer.proxy.desk import Desk
from trinity.explorer.scheduler import BatchResult, TaskStatus
from trinity.utils.metrics import Metrics, summarize

if TYPE_CHECKING:
    from trinity.common.models import ModelWrapper
    from trinity.common.models.api import ApiServer

_HEALTH_TIMEOUT_S = 30.0


class ReplyLog(Protocol):
    """Where all replies are written down (`trinity.buffer.writer`)."""

    async def acquire(self) -> object: ...

    async def write(self, experiences: list[Experience]) -> object: ...

    async def release(self) -> object: ...


@dataclass(frozen=True)
class ServiceSettings:
    """Args:
    host, port: Where the API listens; port 0: any free one.
    api_key: What clients must send.
    address_file: Gets the address once the API answers.
    check_interval_s: Seconds between two health checks.
    min_engines: Engines that must be well; fewer at two checks in a row end the run.
    seed: Seed of what is sampled.
    """

    host: str
    port: int
    api_key: str
    address_file: Path
    check_interval_s: float = 60.0
    min_engines: int = 1
    seed: int = 42


class Service:
    """An API over a model, as the tasks and the scheduler of an explorer.

    ``prepare`` -> (``next_batch`` -> ``submit`` -> ``collect``) for each commit -> ``close``. The
    API answers from the first ``next_batch`` on.

    Args:
        model: Over ``engines``; it keeps no history.
        log: None: replies are not written down.
        say: Shows a line to the person at the screen.
    """

    def __init__(
        self,
        model: "ModelWrapper",
        engines: Sequence[InferenceEngine],
        settings: ServiceSettings,
        log: ReplyLog | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.desk = Desk(keeps_all=log is not None)
        self._model, self._engines, self._settings = model, engines, settings
        self._log, self._say = log, say
        self._server: ApiServer | None = None
        self._batch: list[Experience] = []
        self._num_healthy = len(engines)
        self._logging = asyncio.Lock()
        self._step = 0
        self._tasks: Sequence[Task] = ()
        self._jobs: list[asyncio.Task[None]] = []
        self._logger = logging.getLogger("trinity.part.explorer")

    # As the scheduler

    async def prepare(self) -> None:
        """Open the log of replies. The API opens with the first step, once the engines are up."""
        if self._log is not None:
            await self._log.acquire()

    async def _open(self) -> None:
        from trinity.common.models.api import ApiServer, OneModel
        from trinity.explorer.proxy.routes import feedback_routes

        settings = self._settings
        server = ApiServer(settings.host, settings.port, settings.api_key)
        server.on_chat = self.desk.record
        server.routes = [feedback_routes(self.desk, self.status, server.check)]
        self._server = server
        await asyncio.to_thread(server.start, OneModel(self._model, settings.seed))
        write_text(settings.address_file, f"{server.address}\n")
        self._say(f"The API answers at {server.address}/v1")
        self._jobs = [asyncio.create_task(self._watch_engines())]
        if self._log is not None:
            self._jobs.append(asyncio.create_task(self._write_log(self._log)))

    def stop(self) -> None:
        """Nothing that is under way could be given up."""

    def submit(self, batch_id: int | str, tasks: Sequence[Task]) -> None:
        """The batch is there already: what was committed."""
        self._step, self._tasks = int(batch_id), tasks

    async def collect(
        self, batch_id: int | str, *, min_ratio: float = 1.0, wait_after_min_s: float = 0.0
    ) -> BatchResult:
        """What was committed, as the result of a step."""
        batch, self._batch = self._batch, []
        for experience in batch:
            experience.eid.batch = batch_id
            experience.info.setdefault("use_count", 0)
        statuses = [
            TaskStatus(task.raw_task["task_id"], True, 1, 0.0, "", [], task) for task in self._tasks
        ]
        metrics = summarize([e.metrics for e in batch], "rollout")
        metrics |= {f"rollout/{name}": value for name, value in self.desk.counts().items()}
        metrics["rollout/finished_task_count"] = float(len(statuses))
        metrics |= await self._engine_metrics()
        return BatchResult(batch, statuses, metrics)

    def progress(self, batch_id: int | str) -> tuple[int, int]:
        """All of it: what is collected here has been committed before."""
        return len(self._batch), len(self._batch)

    async def close(self) -> None:
        """Answer what is under way and close the API."""
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
        if self._log is not None:
            with contextlib.suppress(ConnectionError):
                await self._log_replies(self._log)
                await self._log.release()

    # As the source of tasks

    async def next_batch(self) -> list[Task]:
        """A task for each that was committed; waits for a commit.

        Raises:
            ConnectionError: Too few engines are well.
        """
        if self._server is None:
            await self._open()
        commit = asyncio.ensure_future(self.desk.next_batch())
        try:
            await asyncio.wait([commit, *self._jobs], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not commit.done():
                commit.cancel()
        for job in self._jobs:
            if job.done():
                job.result()
        self._batch = await commit
        names = dict.fromkeys(str(e.eid.task) for e in self._batch)
        return [Task(raw_task={"task_id": name}) for name in names]

    def feedback(self, metrics: Mapping[str, object]) -> None:
        """Nothing is selected here."""

    def metrics(self) -> Metrics:
        """Nothing is selected here."""
        return {}

    def state_dict(self) -> dict[str, object]:
        """Nothing: what waits for feedback ends with the process."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Nothing is kept."""

    # Around them

    async def status(self) -> dict[str, object]:
        """Both loops: steps that were committed, and the trainer's weights that answer."""
        return {
            "explorer_step": self._step,
            "model_version": await self._model.model_version_async,
            "engines": len(self._engines),
            "healthy_engines": self._num_healthy,
        }

    async def _engine_metrics(self) -> Metrics:
        """Requests and version of each engine; of one that does not answer, the requests alone."""
        asked = [engine.version() for engine in self._engines]
        versions = await asyncio.gather(*asked, return_exceptions=True)
        metrics: Metrics = {}
        for index, count in enumerate(self._model.endpoint.group.num_requests):
            metrics[f"rollout/model_{index}/total_request_count"] = float(count)
            version = versions[index]
            if not isinstance(version, BaseException):
                metrics[f"rollout/model_{index}/model_version"] = float(version)
        return metrics

    async def _watch_engines(self) -> None:
        """Look after the engines; fewer than needed at two looks in a row is an error."""
        settings, num_bad = self._settings, 0
        while True:
            await asyncio.sleep(settings.check_interval_s)
            self._num_healthy = sum(await asyncio.gather(*map(_is_well, self._engines)))
            num_bad = num_bad + 1 if self._num_healthy < settings.min_engines else 0
            if num_bad:
                self._logger.warning("Engines that are well: %d.", self._num_healthy)
            if num_bad >= 2:
                raise ConnectionError(
                    f"Only {self._num_healthy} of {len(self._engines)} engines answer, but "
                    f"explorer.min_running_model_num is {settings.min_engines}."
                )

    async def _write_log(self, log: ReplyLog) -> None:
        while True:
            await asyncio.sleep(1.0)
            await asyncio.shield(self._log_replies(log))  # a stop does not cut it off

    async def _log_replies(self, log: ReplyLog) -> None:
        """Write down what came since the last time."""
        async with self._logging:
            replies = self.desk.take_unwritten()
            if replies:
                await log.write(replies)


async def _is_well(engine: InferenceEngine) -> bool:
    try:
        await asyncio.wait_for(engine.health(), _HEALTH_TIMEOUT_S)
    except Exception:  # an engine: its death is found and mended by the keeper
        return False
    return True
