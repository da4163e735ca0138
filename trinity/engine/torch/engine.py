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

import psutil
import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trinity.common.models.adapters import add_adapter_inplace
from trinity.common.models.allocator import use_tight_memory
from trinity.common.models.lean import make_lean_inplace
from trinity.common.models.loading import (
    cast_parameters,
    end_of_sequence_ids,
    load_causal_lm,
    load_tokenizer,
)
from trinity.common.models.protocol import Completion, SamplingParams, WeightTicket
from trinity.engine.torch.attention import IMPLEMENTATION
from trinity.engine.torch.batcher import Batcher, Limits
from trinity.engine.torch.jobs import Job, SampleJob, ScoreJob
from trinity.engine.torch.packed_linear import pack_linears_inplace
from trinity.engine.torch.sampler import stream_key
from trinity.engine.torch.settings import TorchEngineSettings
from trinity.engine.torch.stopping import StopTexts
from trinity.engine.torch.weights import load_weights_inplace
from trinity.synchronizer.channel import open_weights
from trinity.utils.log import get_logger
from trinity.utils.memory import release_free_memory

T = TypeVar("T")

_KV_SHARE = 0.4  # of the memory that is free once the model is loaded
_IDLE_S = 0.5  # without work: then free memory goes to who works, such as a trainer
_KEPT_SHARE = 0.25  # of that, for prompts that may be used again


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
        self._refuse_other_adapter(adapter)
        return await self._sample(prompt_ids, params)

    async def sample_with_images(
        self, prompt_ids: Sequence[int], images: Tensor, params: SamplingParams
    ) -> list[Completion]:
        """``params.n`` samples of a prompt with ``images`` [images, C, H, W]."""
        return await self._sample(prompt_ids, params, images)

    async def _sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, images: Tensor | None = None
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
        job.images = images
        with self._named(params.request_id, job):
            await self._finished(job)
        return [completion for completion in job.completions if completion is not None]

    async def partial(self, request_id: str) -> list[list[int]]:
        """New tokens so far of each sample of a running request; [] if none are known."""
        job, batcher = self._by_name.get(request_id), self._ready_batcher
        if job is None:
            return []
        return await self._answer(lambda: batcher.tokens_so_far(job))

    async def logprobs(
        self, token_ids: Sequence[int], temperature: float = 1.0, adapter: str | None = None
    ) -> list[float]:
        """Log-probability of each token given those before it: ``len(token_ids) - 1`` values."""
        self._refuse_other_adapter(adapter)
        self._require_sound()
        if len(token_ids) < 2:
            return []
        if len(token_ids) > self._max_model_len:
            raise ValueError(
                f"{len(token_ids)} tokens are more than max_model_len = {self._max_model_len}."
            )
        job = ScoreJob(token_ids, temperature, _ignore)
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
        self._refuse_other_adapter(ticket.adapter)
        done: Future[str] = Future()
        self._put(lambda: self._updates.append((ticket, done)))
        return await asyncio.wrap_future(done)

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
        batcher = self._ready_batcher
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {
            "running": len(batcher.rows) + len(batcher.prefilling),
            "waiting": len(batcher.waiting) + len(batcher.ready),
            "tokens": batcher.num_tokens,
            "steps": batcher.num_steps,
            "version": batcher.version,
            "kv_cache_mb": batcher.kv_bytes / 2**20,
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

    def _require_running(self) -> None:
        if self._ended:
            raise ConnectionError(self._ended)

    def _refuse_other_adapter(self, adapter: str | None) -> None:
        own = self._settings.adapter
        if adapter is not None and (own is None or own.name != adapter):
            raise ValueError(f"The torch engine has no adapter {adapter!r}.")

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
        batcher = self._ready_batcher
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
        self._put(lambda: batcher.submit(job))
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
            self._batcher = self._load()
        except BaseException as error:  # whatever it is, the caller of prepare() gets it
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(None)
        try:
            while not self._is_closing:
                self._work()
        except Exception as error:  # the boundary of the worker: all that wait get the error
            self._log.exception("The engine's worker failed.")
            self._end(self._batcher, f"The engine has failed: {error!r}")
        else:
            self._end(self._batcher, "The engine was closed.")

    def _work(self) -> None:
        for action in self._take_inbox():
            action()
        if self._updates and not self._is_draining:
            self._update(*self._updates.popleft())
        if self._is_stepping:
            self._step()

    def _end(self, batcher: Batcher, why: str) -> None:
        """Fail what is left. Nothing can be put into the inbox any more."""
        with self._wake:
            self._ended = why
        for action in self._inbox:
            action()
        closed = ConnectionError(why)
        batcher.fail_all(closed)
        for _, done in self._updates:
            if done.set_running_or_notify_cancel():
                done.set_exception(closed)

    def _load(self) -> Batcher:
        settings = self._settings
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        if settings.device == "cpu":
            use_tight_memory()
        model, is_random = load_causal_lm(
            settings.model_path,
            settings.dtype,
            settings.init_seed,
            device=settings.device,
            attn_implementation=IMPLEMENTATION,
            trust_remote_code=settings.trust_remote_code,
            config_overrides=settings.config_overrides,
        )
        if settings.adapter is not None:
            dtype = next(model.parameters()).dtype
            add_adapter_inplace(model, settings.adapter)
            cast_parameters(model, dtype)
        if settings.device == "cpu":
            make_lean_inplace(model)
        if settings.adapter is None:
            pack_linears_inplace(model, model.get_output_embeddings())
        if is_random:
            self._log.warning(
                "%s holds no weights: initialised at random with seed %d.",
                settings.model_path,
                settings.init_seed,
            )
        allowed = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._max_model_len = settings.max_model_len or allowed or 4096
        self._eos_ids = end_of_sequence_ids(settings.model_path)
        kv_bytes = settings.kv_cache_bytes or int(_free_memory(settings.device) * _KV_SHARE)
        limits = Limits(
            max_batch_tokens=settings.max_batch_tokens,
            max_running=settings.max_running,
            max_kv_bytes=kv_bytes,
            max_kept_bytes=int(kv_bytes * _KEPT_SHARE) if settings.enable_prefix_caching else 0,
            num_threads=torch.get_num_threads(),
        )
        batcher = Batcher(model, limits, self._eos_ids)
        batcher.version = settings.version
        batcher.probe()
        return batcher

    @property
    def _is_stepping(self) -> bool:
        batcher = self._ready_batcher
        if self._is_paused or self._is_closing:
            return False
        return batcher.has_running if self._updates else batcher.has_work

    @property
    def _is_draining(self) -> bool:
        """Whether an update waits for running requests to finish."""
        mode, is_running = self._settings.update_mode, self._ready_batcher.has_running
        return bool(self._updates) and mode == "pause" and is_running and not self._is_paused

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
        batcher = self._ready_batcher
        try:
            batcher.step(may_admit=not self._updates)
        except Exception as error:  # the boundary of a step: its requests get the error
            self._log.exception("A step of the engine failed.")
            batcher.fail_all(error)

    def _update(self, ticket: WeightTicket, done: "Future[str]") -> None:
        if not done.set_running_or_notify_cancel():  # nobody waits for it any more
            return
        batcher = self._ready_batcher
        try:
            if self._settings.update_mode == "abort":
                batcher.restart_running()
            digest = load_weights_inplace(batcher.model, open_weights(ticket))
            if ticket.digest and digest != ticket.digest:
                raise RuntimeError(
                    f"After loading version {ticket.version} the engine's weights have digest "
                    f"{digest}, but the trainer sent {ticket.digest}."
                )
            batcher.version = ticket.version
            batcher.forget_prompts()
        except Exception as error:  # the boundary of an update: its caller gets the error
            self._broken = error
            done.set_exception(error)
            batcher.fail_all(RuntimeError(f"The weight update failed: {error}"))
            return
        self._broken = None
        done.set_result(digest)


def _free_memory(device: str) -> int:
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(torch.device(device))[0]
    return int(psutil.virtual_memory().available)


def _ignore(job: Job) -> None:
    """Replaced once the job is submitted."""
