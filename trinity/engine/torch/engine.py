"""`TorchEngine`: the async face of a `Batcher` that runs in a thread of its own."""

import asyncio
import contextlib
import itertools
import resource
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import cached_property
from typing import TypeVar

from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trinity.common.models.loading import (
    load_tokenizer,
)
from trinity.common.models.protocol import (
    Completion,
    NamedAdapter,
    SamplingParams,
    WeightTicket,
)
from trinity.engine.torch.batcher import Batcher
from trinity.engine.torch.jobs import Job, SampleJob, ScoreJob
from trinity.engine.torch.named import NamedAdapters
from trinity.engine.torch.sampler import stream_key
from trinity.engine.torch.settings import TorchEngineSettings
from trinity.engine.torch.starting import start
from trinity.engine.torch.stopping import StopTexts
from trinity.engine.torch.weights import load_weights_inplace
from trinity.synchronizer.channel import open_weights
from trinity.utils.log import get_logger
from trinity.utils.memory import release_free_memory

T = TypeVar("T")

_IDLE_S = 0.5  # without work: then free memory goes to who works, such as a trainer


class TorchEngine:
    """Samples from a Hugging Face causal model by continuous batching.

    Sample i of a request with seed s has the same tokens whatever else the engine works on, if
    the number of threads is a power of two.

    Lifecycle: ``prepare`` -> concurrent calls -> ``close``.
    """

    def __init__(self, settings: TorchEngineSettings) -> None:
        self._settings = settings
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._loaded: Future[None] = Future()
        self._batcher: Batcher | None = None
        self._adapters: NamedAdapters | None = None
        self._max_model_len = 0
        self._eos_ids: tuple[int, ...] = ()
        self._is_paused = False
        self._updates: deque[tuple[WeightTicket, Future[str]]] = deque()
        self._is_closing = False
        self._ended = ""  # why, once it has
        self._broken: BaseException | None = None
        self._requests = itertools.count()
        self._by_name: dict[str, SampleJob] = {}
        self._log = get_logger("engine")

    async def prepare(self) -> None:
        """Load the model and be ready to sample."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
            self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._loaded))

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str | None = None
    ) -> list[Completion]:
        """``params.n`` samples of one prompt, in order of their index.

        Raises:
            ValueError: The prompt is empty or leaves no room for a new token.
        """
        return await self._sample(prompt_ids, params, adapter=self._known(adapter))

    async def sample_with_images(
        self, prompt_ids: Sequence[int], images: Tensor, params: SamplingParams
    ) -> list[Completion]:
        """``params.n`` samples of a prompt with ``images`` [images, C, H, W]."""
        return await self._sample(prompt_ids, params, images)

    async def _sample(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        images: Tensor | None = None,
        adapter: str | None = None,
    ) -> list[Completion]:
        self._require_sound()
        room = self._max_model_len - len(prompt_ids)
        if not len(prompt_ids) or room < 1:
            raise ValueError(
                f"The prompt has {len(prompt_ids)} tokens; it must have at least 1 and at most "
                f"max_model_len - 1 = {self._max_model_len - 1}."
            )
        seed = self._settings.seed + next(self._requests) if params.seed is None else params.seed
        own_ids = () if params.ignore_eos else self._eos_ids
        job = SampleJob(
            prompt_ids,
            params,
            _ignore,
            stream_keys=[stream_key(seed, index) for index in range(params.n)],
            max_tokens=min(room, params.max_tokens or room),
            stop_ids=sorted({*own_ids, *params.stop_token_ids}),
            is_usual=not (params.stop or params.stop_token_ids or params.ignore_eos),
            has_stop_text=StopTexts(self._tokenizer, params.stop) if params.stop else None,
        )
        job.images, job.adapter = images, adapter
        with self._named(params.request_id, job):
            await self._finished(job)
        return [completion for completion in job.completions if completion is not None]

    async def partial(self, request_id: str) -> list[list[int]]:
        """New tokens so far of each sample of a running request; [] if none are known."""
        job = self._by_name.get(request_id)
        if job is None:
            return []
        return await self._answer(lambda: self._batcher_of(job).tokens_so_far(job))

    async def logprobs(
        self, token_ids: Sequence[int], temperature: float = 1.0, adapter: str | None = None
    ) -> list[float]:
        """Log-probability of each token given those before it: ``len(token_ids) - 1`` values."""
        named = self._known(adapter)
        self._require_sound()
        if len(token_ids) < 2:
            return []
        if len(token_ids) > self._max_model_len:
            raise ValueError(
                f"{len(token_ids)} tokens are more than max_model_len = {self._max_model_len}."
            )
        job = ScoreJob(token_ids, temperature, _ignore)
        job.adapter = named
        await self._finished(job)
        return job.logprobs

    async def load_weights(self, ticket: WeightTicket) -> str:
        """Replace the weights by those of ``ticket``; the digest of what the engine now runs.

        What becomes of running requests is ``update_mode``; while the engine is paused they
        cannot finish first, so "pause" then means "keep".

        Raises:
            RuntimeError: The digest is not the ticket's. The engine samples no more.
            ValueError: Names, shapes or dtypes don't fit. The engine samples no more.
        """
        if self._known(ticket.adapter) is not None:
            raise ValueError(f"The adapter {ticket.adapter!r} is not trained: no weights for it.")
        done: Future[str] = Future()
        self._put(lambda: self._updates.append((ticket, done)))
        return await asyncio.wrap_future(done)

    async def adapters(self) -> list[NamedAdapter]:
        """Those that requests may name now, in the order in which they came."""
        return self._adapters.adapters if self._adapters is not None else []

    async def load_adapter(self, adapter: NamedAdapter) -> None:
        """Have one more; requests that run go on once it is there.

        Raises:
            ValueError: The name is taken, there are too many, or the files don't fit the model.
        """
        named, own = self._adapters, self._settings.adapter
        if named is None:
            raise ValueError("The engine was not started for adapters that requests name.")
        if own is not None and own.name == adapter.name:
            raise ValueError(f"The name {own.name!r} is taken by the adapter that is trained.")
        await self._answer(lambda: named.load(adapter, self._ready_batcher.version))

    async def unload_adapter(self, name: str) -> None:
        """Have it no longer: what runs on it fails. `LookupError` if there is none."""
        named = self._adapters
        if named is None:
            raise LookupError(f"The engine has no adapter {name!r}.")
        await self._answer(lambda: named.unload(name))

    async def pause(self) -> None:
        """Finish no further step until `resume`; requests wait."""

        def pause() -> None:
            self._is_paused = True

        await self._answer(pause)

    async def resume(self) -> None:
        def resume() -> None:
            self._is_paused = False

        self._put(resume)

    async def version(self) -> int:
        """Version of the weights that sample now."""
        return self._ready_batcher.version

    async def health(self) -> dict[str, float]:
        """Figures for the log."""
        batchers = self._batchers
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {
            "running": sum(len(b.rows) + len(b.prefilling) for b in batchers),
            "waiting": sum(len(b.waiting) + len(b.ready) for b in batchers),
            "tokens": sum(b.num_tokens for b in batchers),
            "steps": sum(b.num_steps for b in batchers),
            "version": batchers[0].version,
            "kv_cache_mb": sum(b.kv_bytes for b in batchers) / 2**20,
            "peak_memory_mb": peak,
        }

    async def close(self) -> None:
        """End the worker; what still runs fails with `ConnectionError`."""
        if self._thread is None:
            return

        def stop() -> None:
            self._is_closing = True

        with contextlib.suppress(ConnectionError):
            self._put(stop)
        await asyncio.to_thread(self._thread.join)
        self._thread = None

    # In the caller's thread

    @contextlib.contextmanager
    def _named(self, request_id: str | None, job: SampleJob) -> Iterator[None]:
        """While this lasts, `partial` finds ``job`` by its name."""
        if request_id is None:
            yield
            return
        self._by_name[request_id] = job
        try:
            yield
        finally:
            self._by_name.pop(request_id, None)

    @property
    def _ready_batcher(self) -> Batcher:
        if self._batcher is None or self._thread is None:
            raise RuntimeError("The engine is not ready: await prepare() first.")
        self._require_running()
        return self._batcher

    @property
    def _batchers(self) -> list[Batcher]:
        """That of the model itself, and those of the adapters beside it."""
        others = {} if self._adapters is None else self._adapters.batchers
        return [self._ready_batcher, *others.values()]

    def _batcher_of(self, job: Job) -> Batcher:
        """Asked by the worker. `ValueError` if the adapter has gone meanwhile."""
        if job.adapter is None:
            return self._ready_batcher
        found = None if self._adapters is None else self._adapters.batchers.get(job.adapter)
        if found is None:
            raise ValueError(f"The torch engine has no adapter {job.adapter!r}.")
        return found

    def _submit(self, job: Job) -> None:
        try:
            self._batcher_of(job).submit(job)
        except ValueError as error:
            job.error = error
            job.on_done(job)

    def _require_running(self) -> None:
        if self._ended:
            raise ConnectionError(self._ended)

    def _known(self, adapter: str | None) -> str | None:
        """The adapter if it is one beside the model; None for what updates bring."""
        own = self._settings.adapter
        if adapter is None or (own is not None and own.name == adapter):
            return None
        if self._adapters is None or adapter not in self._adapters.batchers:
            raise ValueError(f"The torch engine has no adapter {adapter!r}.")
        return adapter

    def _require_sound(self) -> None:
        """Raise unless the engine is ready and its weights are whole."""
        _ = self._ready_batcher
        if self._broken is not None:
            raise RuntimeError(f"The engine stopped: {self._broken}") from self._broken

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._settings.model_path, self._settings.trust_remote_code)

    async def _answer(self, question: Callable[[], T]) -> T:
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

    async def _finished(self, job: Job) -> None:
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
        self._batcher, self._adapters = started.batcher, started.named
        self._max_model_len, self._eos_ids = started.max_model_len, started.eos_ids
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
        batchers = self._batchers
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

    @property
    def _is_stepping(self) -> bool:
        if self._is_paused or self._is_closing:
            return False
        if self._updates:
            return any(batcher.has_running for batcher in self._batchers)
        return any(batcher.has_work for batcher in self._batchers)

    @property
    def _is_draining(self) -> bool:
        """Whether an update waits for running requests to finish."""
        if not self._updates or self._is_paused or self._settings.update_mode != "pause":
            return False
        return any(batcher.has_running for batcher in self._batchers)

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
        for batcher in self._batchers:
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
        batchers = self._batchers
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
                batcher.version = ticket.version
                batcher.forget_prompts()
        except Exception as error:  # the boundary of an update: its caller gets the error
            self._broken = error
            done.set_exception(error)
            for batcher in batchers:
                batcher.fail_all(RuntimeError(f"The weight update failed: {error}"))
            return
        self._broken = None
        done.set_result(digest)


def _ignore(job: Job) -> None:
    """Replaced once the job is submitted."""
