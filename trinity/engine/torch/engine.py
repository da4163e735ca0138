"""`TorchEngine`: the async face of a `Worker`, which runs the model in a thread of its own."""

import contextlib
import itertools
import resource
from collections.abc import Iterator, Sequence
from functools import cached_property

from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trinity.common.models.loading import load_tokenizer
from trinity.common.models.prompts import require_known, room_behind
from trinity.common.models.protocol import (
    Completion,
    NamedAdapter,
    SamplingParams,
    WeightTicket,
)
from trinity.engine.torch.jobs import Job, SampleJob, ScoreJob
from trinity.engine.torch.sampler import stream_key
from trinity.engine.torch.settings import TorchEngineSettings
from trinity.engine.torch.stopping import StopTexts
from trinity.engine.torch.worker import Worker


class TorchEngine:
    """Samples from a Hugging Face causal model by continuous batching.

    Sample i of a request with seed s has the same tokens whatever else the engine works on, if
    the number of threads is a power of two.

    Lifecycle: ``prepare`` -> concurrent calls -> ``close``.
    """

    def __init__(self, settings: TorchEngineSettings) -> None:
        self._settings = settings
        self._worker = Worker(settings)
        self._requests = itertools.count()
        self._by_name: dict[str, SampleJob] = {}

    async def prepare(self) -> None:
        """Load the model and be ready to sample."""
        await self._worker.start()

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str | None = None
    ) -> list[Completion]:
        """``params.n`` samples of one prompt, in order of their index.

        Raises:
            ValueError: The prompt is empty, leaves no room for a new token, or has one that the
                model does not know.
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
        self._worker.require_sound()
        room = room_behind(prompt_ids, self._worker.max_model_len)
        for ids in (prompt_ids, params.stop_token_ids):
            require_known(ids, self._worker.vocabulary_size)
        seed = self._settings.seed + next(self._requests) if params.seed is None else params.seed
        own_ids = () if params.ignore_eos else self._worker.eos_ids
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
            await self._worker.finished(job)
        return [completion for completion in job.completions if completion is not None]

    async def partial(self, request_id: str) -> list[list[int]]:
        """New tokens so far of each sample of a running request; [] if none are known."""
        job = self._by_name.get(request_id)
        if job is None:
            return []
        return await self._worker.answer(lambda: self._worker.batcher_of(job).tokens_so_far(job))

    async def logprobs(
        self, token_ids: Sequence[int], temperature: float = 1.0, adapter: str | None = None
    ) -> list[float]:
        """Log-probability of each token given those before it: ``len(token_ids) - 1`` values."""
        named = self._known(adapter)
        self._worker.require_sound()
        if len(token_ids) < 2:
            return []
        longest = self._worker.max_model_len
        if len(token_ids) > longest:
            raise ValueError(f"{len(token_ids)} tokens are more than max_model_len = {longest}.")
        require_known(token_ids, self._worker.vocabulary_size)
        job = ScoreJob(token_ids, temperature, _ignore)
        job.adapter = named
        await self._worker.finished(job)
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
        return await self._worker.load_weights(ticket)

    async def adapters(self) -> list[NamedAdapter]:
        """Those that requests may name now, in the order in which they came."""
        named = self._worker.named
        return named.adapters if named is not None else []

    async def load_adapter(self, adapter: NamedAdapter) -> None:
        """Have one more; requests that run go on once it is there.

        Raises:
            ValueError: The name is taken, there are too many, or the files don't fit the model.
        """
        named, own = self._worker.named, self._settings.adapter
        if named is None:
            raise ValueError("The engine was not started for adapters that requests name.")
        if own is not None and own.name == adapter.name:
            raise ValueError(f"The name {own.name!r} is taken by the adapter that is trained.")
        await self._worker.answer(lambda: named.load(adapter, self._worker.ready_batcher.version))

    async def unload_adapter(self, name: str) -> None:
        """Have it no longer: what runs on it fails. `LookupError` if there is none."""
        named = self._worker.named
        if named is None:
            raise LookupError(f"The engine has no adapter {name!r}.")
        await self._worker.answer(lambda: named.unload(name))

    async def pause(self) -> None:
        """Finish no further step until `resume`; requests wait."""
        await self._worker.pause()

    async def resume(self) -> None:
        self._worker.resume()

    async def version(self) -> int:
        """Version of the weights that sample now."""
        return self._worker.ready_batcher.version

    async def health(self) -> dict[str, float]:
        """Figures for the log."""
        batchers = self._worker.batchers
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
        await self._worker.close()

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

    def _known(self, adapter: str | None) -> str | None:
        """The adapter if it is one beside the model; None for what updates bring."""
        own = self._settings.adapter
        if adapter is None or (own is not None and own.name == adapter):
            return None
        named = self._worker.named
        if named is None or adapter not in named.batchers:
            raise ValueError(f"The torch engine has no adapter {adapter!r}.")
        return adapter

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._settings.model_path, self._settings.trust_remote_code)


def _ignore(job: Job) -> None:
    """Replaced once the job is submitted."""
