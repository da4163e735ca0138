"""`Worker`: the thread that a model runs in. What others want of it happens between two steps."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

from trinity.common.models.protocol import WeightTicket
from trinity.engine.torch.batcher import Batcher
from trinity.engine.torch.jobs import Job
from trinity.engine.torch.named import NamedAdapters
from trinity.engine.torch.settings import TorchEngineSettings
from trinity.engine.torch.starting import start
from trinity.engine.torch.weights import load_weights_inplace
from trinity.synchronizer.channel import open_weights
from trinity.utils.log import get_logger
from trinity.utils.memory import release_free_memory

T = TypeVar("T")

_IDLE_S = 0.5  # without work: then free memory goes to who works, such as a trainer


class Worker:
    """Runs the batcher of a model, and those of the adapters beside it.

    Lifecycle: ``start`` -> jobs, questions and weights -> ``close``.
    """

    def __init__(self, settings: TorchEngineSettings) -> None:
        self._settings = settings
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._loaded: Future[None] = Future()
        self._batcher: Batcher | None = None
        self.named: NamedAdapters | None = None
        """Adapters that requests may name; None where there may be none."""
        self.max_model_len = 0
        self.eos_ids: tuple[int, ...] = ()
        self.vocabulary_size = 0
        self._is_paused = False
        self._updates: deque[tuple[WeightTicket, Future[str]]] = deque()
        self._is_closing = False
        self._ended = ""  # why, once it has
        self._broken: BaseException | None = None
        self._log = get_logger("engine")

    async def start(self) -> None:
        """Load the model and be ready for jobs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
            self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._loaded))

    async def close(self) -> None:
        """End the thread; what still runs fails with `ConnectionError`."""
        if self._thread is None:
            return

        def stop() -> None:
            self._is_closing = True

        with contextlib.suppress(ConnectionError):
            self._put(stop)
        await asyncio.to_thread(self._thread.join)
        self._thread = None

    # In the caller's thread

    @property
    def ready_batcher(self) -> Batcher:
        """That of the model itself; `ConnectionError` once the worker has ended."""
        if self._batcher is None or self._thread is None:
            raise RuntimeError("The engine is not ready: await prepare() first.")
        self._require_running()
        return self._batcher

    @property
    def batchers(self) -> list[Batcher]:
        """That of the model itself, and those of the adapters beside it."""
        others = {} if self.named is None else self.named.batchers
        return [self.ready_batcher, *others.values()]

    def batcher_of(self, job: Job) -> Batcher:
        """Asked by the worker. `ValueError` if the adapter has gone meanwhile."""
        if job.adapter is None:
            return self.ready_batcher
        found = None if self.named is None else self.named.batchers.get(job.adapter)
        if found is None:
            raise ValueError(f"The torch engine has no adapter {job.adapter!r}.")
        return found

    def require_sound(self) -> None:
        """Raise unless the engine is ready and its weights are whole."""
        _ = self.ready_batcher
        if self._broken is not None:
            raise RuntimeError(f"The engine stopped: {self._broken}") from self._broken

    async def pause(self) -> None:
        """Finish no further step until `resume`."""

        def pause() -> None:
            self._is_paused = True

        await self.answer(pause)

    def resume(self) -> None:
        """Go on with what runs and waits."""

        def resume() -> None:
            self._is_paused = False

        self._put(resume)

    async def load_weights(self, ticket: WeightTicket) -> str:
        """Have the weights of ``ticket``; the digest of what is there then."""
        done: Future[str] = Future()
        self._put(lambda: self._updates.append((ticket, done)))
        return await asyncio.wrap_future(done)

    async def answer(self, question: Callable[[], T]) -> T:
        """What ``question`` gives, asked by the worker between two steps."""
        answer: Future[T] = Future()

        def ask() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(question())
            except Exception as error:  # goes to who asked
                answer.set_exception(error)

        self._put(ask)
        return await asyncio.wrap_future(answer)

    async def finished(self, job: Job) -> None:
        """Until ``job`` is done; raises its error. A caller that goes away cancels it."""
        done: Future[None] = Future()

        def on_done(job: Job) -> None:
            with contextlib.suppress(InvalidStateError):  # the caller has gone
                if job.error is None:
                    done.set_result(None)
                else:
                    done.set_exception(job.error)

        def cancel() -> None:
            job.is_cancelled = True

        job.on_done = on_done
        self._put(lambda: self._submit(job))
        try:
            await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            with contextlib.suppress(ConnectionError):
                self._put(cancel)
            raise

    def _require_running(self) -> None:
        if self._ended:
            raise ConnectionError(self._ended)

    def _put(self, action: Callable[[], None]) -> None:
        """Have the worker do ``action`` between two steps."""
        if self._thread is None:
            raise RuntimeError("The engine is not running: await prepare() first.")
        with self._wake:
            self._require_running()
            self._inbox.append(action)
            self._wake.notify()

    # In the worker's thread

    def _run(self) -> None:
        try:
            started = start(self._settings, self._log)
        except BaseException as error:  # whatever it is, the caller of prepare() gets it
            self._loaded.set_exception(error)
            return
        self._batcher, self.named = started.batcher, started.named
        self.max_model_len, self.eos_ids = started.max_model_len, started.eos_ids
        self.vocabulary_size = started.vocabulary_size
        self._loaded.set_result(None)
        try:
            while not self._is_closing:
                self._work()
        except Exception as error:  # the boundary of the worker: all that wait get the error
            self._log.exception("The engine's worker failed.")
            self._end(f"The engine has failed: {error!r}")
        else:
            self._end("The engine was closed.")

    def _work(self) -> None:
        for action in self._take_inbox():
            action()
        if self._updates and not self._is_draining:
            self._update(*self._updates.popleft())
        if self._is_stepping:
            self._step()

    def _end(self, why: str) -> None:
        """Fail what is left. Nothing can be put into the inbox any more."""
        batchers = self.batchers
        with self._wake:
            self._ended = why
        for action in self._inbox:
            action()
        closed = ConnectionError(why)
        for batcher in batchers:
            batcher.fail_all(closed)
        for _, done in self._updates:
            if done.set_running_or_notify_cancel():
                done.set_exception(closed)

    def _submit(self, job: Job) -> None:
        try:
            self.batcher_of(job).submit(job)
        except (ValueError, ConnectionError) as error:  # no such adapter, or the end has come
            job.error = error
            job.on_done(job)

    @property
    def _is_stepping(self) -> bool:
        if self._is_paused or self._is_closing:
            return False
        if self._updates:
            return any(batcher.has_running for batcher in self.batchers)
        return any(batcher.has_work for batcher in self.batchers)

    @property
    def _is_draining(self) -> bool:
        """Whether an update waits for running requests to finish."""
        if not self._updates or self._is_paused or self._settings.update_mode != "pause":
            return False
        return any(batcher.has_running for batcher in self.batchers)

    def _take_inbox(self) -> list[Callable[[], None]]:
        with self._wake:
            is_idle = not self._wake.wait_for(self._has_something, timeout=_IDLE_S)
        if is_idle:
            release_free_memory()
        with self._wake:
            self._wake.wait_for(self._has_something)
            actions, self._inbox = self._inbox, []
        return actions

    def _has_something(self) -> bool:
        return bool(self._inbox or self._is_stepping or self._updates)

    def _step(self) -> None:
        for batcher in self.batchers:
            if not batcher.has_work:
                continue
            try:
                batcher.step(may_admit=not self._updates)
            except Exception as error:  # the boundary of a step: its requests get the error
                self._log.exception("A step of the engine failed.")
                batcher.fail_all(error)

    def _update(self, ticket: WeightTicket, done: "Future[str]") -> None:
        if not done.set_running_or_notify_cancel():  # nobody waits for it any more
            return
        batchers = self.batchers
        try:
            if self._settings.update_mode == "abort":
                for batcher in batchers:
                    batcher.restart_running()
            digest = load_weights_inplace(batchers[0].model, open_weights(ticket))
            if ticket.digest and digest != ticket.digest:
                raise RuntimeError(
                    f"After loading version {ticket.version} the engine's weights have digest "
                    f"{digest}, but the trainer sent {ticket.digest}."
                )
            for batcher in batchers:
                batcher.renew(ticket.version)
        except Exception as error:  # the boundary of an update: its caller gets the error
            self._broken = error
            done.set_exception(error)
            for batcher in batchers:
                batcher.fail_all(RuntimeError(f"The weight update failed: {error}"))
            return
        self._broken = None
        done.set_result(digest)
