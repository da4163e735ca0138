"""`VLLMEngine`: vLLM's `AsyncLLM` behind the face of an `InferenceEngine`."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, cast

from vllm import SamplingParams as VLLMParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from trinity.common.models.protocol import (
    Completion,
    NamedAdapter,
    SamplingParams,
    WeightTicket,
)
from trinity.engine.vllm.adapter import ServedAdapter
from trinity.engine.vllm.named import NamedAdapters, cant_load
from trinity.engine.vllm.sampling import finish_reason, is_cut, logprobs_of, parts, vllm_params
from trinity.engine.vllm.settings import VLLMEngineSettings
from trinity.engine.vllm.shipping import expected_shapes
from trinity.engine.vllm.starting import ModelFolder, start_llm
from trinity.engine.vllm.updates import WeightReceiver
from trinity.synchronizer import ipc, nccl
from trinity.utils.actor import ProcessDied, ProcessRestarted
from trinity.utils.log import get_logger

_AT_ONCE = (nccl.METHOD, ipc.METHOD)
"""Channels whose weights all change between two steps of vLLM's."""

_PAUSE_MODES = {"pause": "wait", "keep": "keep", "abort": "abort"}
_MAX_RESTARTS = 3  # of vLLM's process; one more death is final


class VLLMEngine:
    """Samples with vLLM, in a process that vLLM starts.

    Logprobs are those of the distribution that was sampled from, which vLLM takes after top-p,
    top-k and min-p: with those in use they are not those of the whole distribution.

    If vLLM's process dies, all calls raise `ProcessRestarted` until ``prepare`` has started it
    anew. Where weights had been updated, requests then wait for ``load_weights``.

    Lifecycle: ``prepare`` -> concurrent calls -> ``close``.
    """

    def __init__(self, settings: VLLMEngineSettings) -> None:
        self._settings = settings
        self._adapter = _adapter_of(settings)
        self._num_restarts = 0
        self._has_updates = False
        self._lacks_weights = False
        self._llm: AsyncLLM | None = None
        self._log = get_logger("engine")
        self._folder = ModelFolder(settings, self._log)
        self._named = NamedAdapters(self._adapter)
        self._receiver: WeightReceiver | None = None
        self._max_model_len = 0
        self._version = settings.version
        self._ids = itertools.count()
        self._running = 0
        self._num_tokens = 0
        self._broken: Exception | None = None
        self._may_start = asyncio.Event()
        self._update_lock = asyncio.Lock()
        self._is_asleep = False
        self._is_closed = False
        self._has_warned = False
        self._partial: dict[str, dict[int, Completion]] = {}

    async def prepare(self) -> None:
        """Start vLLM and wait until it is ready to sample; if its process died, start it anew."""
        if self._llm is not None:
            if not self._llm.errored:
                return
            await self._bury(self._llm)
        path = await asyncio.to_thread(self._folder.path)
        llm = await asyncio.to_thread(start_llm, self._settings, path, self._adapter)
        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        self._max_model_len = llm.vllm_config.model_config.max_model_len
        self._receiver = await asyncio.to_thread(self._receiver_for, llm, path)
        await self._load_adapters(llm)
        self._llm = llm
        if not self._lacks_weights:
            self._may_start.set()

    async def _bury(self, llm: AsyncLLM) -> None:
        """Forget all that was in a process that died."""
        self._num_restarts += 1
        self._may_start.clear()
        self._llm, self._broken, self._is_asleep = None, None, False
        self._version, self._lacks_weights = self._settings.version, self._has_updates
        await asyncio.to_thread(llm.shutdown)

    def _receiver_for(self, llm: AsyncLLM, path: str) -> WeightReceiver:
        settings = self._settings
        shapes = expected_shapes(path, settings.trust_remote_code)
        num_workers = settings.tensor_parallel_size * settings.pipeline_parallel_size
        dtype = llm.vllm_config.model_config.dtype
        return WeightReceiver(llm, shapes, dtype, num_workers, self._adapter)

    async def _load_adapters(self, llm: AsyncLLM) -> None:
        """The one to be trained, and those of the settings beside it.

        After a restart vLLM reads the others again when they are first asked for.
        """
        try:
            if self._adapter is not None:
                await asyncio.to_thread(self._adapter.prepare, llm.vllm_config.model_config.dtype)
                await _load_first(self._adapter, llm)
            for adapter in self._settings.named_adapters if not self._num_restarts else ():
                await self._load_named(adapter, llm)
        except ValueError:
            await asyncio.to_thread(llm.shutdown)
            raise

    async def _load_named(self, adapter: NamedAdapter, llm: AsyncLLM) -> None:
        request = await asyncio.to_thread(self._named.meet, adapter)
        try:
            await llm.add_lora(request)
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM raises all kinds
            self._named.discard(request)
            raise cant_load(adapter, error) from error
        self._named.add(adapter, request)

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str | None = None
    ) -> list[Completion]:
        """``params.n`` samples of one prompt, in order of their index.

        Raises:
            ValueError: The prompt is empty or leaves no room for a new token.
            ProcessDied: vLLM's process has ended.
        """
        lora = self._lora_of(adapter)
        self._require_sound()
        room = self._max_model_len - len(prompt_ids)
        if not len(prompt_ids) or room < 1:
            raise ValueError(
                f"The prompt has {len(prompt_ids)} tokens; it must have at least 1 and at most "
                f"max_model_len - 1 = {self._max_model_len - 1}."
            )
        self._warn_of_cuts(params)
        prompt = _Prompt(list(prompt_ids), lora)
        indices = parts(params, self._settings)
        jobs = [self._some(prompt, params, part, room) for part in indices]
        try:
            with self._named.in_use(lora):
                return [sample for part in await asyncio.gather(*jobs) for sample in part]
        finally:
            self._partial.pop(params.request_id or "", None)

    async def partial(self, request_id: str) -> list[list[int]]:
        """New tokens so far of each sample of a running request; [] if none are known."""
        samples = self._partial.get(request_id, {})
        return [list(sample.token_ids) for _, sample in sorted(samples.items())]

    async def logprobs(
        self, token_ids: Sequence[int], temperature: float = 1.0, adapter: str | None = None
    ) -> list[float]:
        """Log-probability of each token given those before it: ``len(token_ids) - 1`` values.

        All are of the same weights: what new ones fall into is asked for again. vLLM scores whole
        prompts at temperature 1 only; at another one every token is asked for on its own, which
        costs a request each.
        """
        lora = self._lora_of(adapter)
        self._require_sound()
        ids = list(token_ids)
        with self._named.in_use(lora):
            while True:
                await self._may_start.wait()
                self._require_sound()
                version = self._version
                found = await self._scored(_Prompt(ids, lora), temperature)
                if found is not None and self._version == version:
                    return found

    async def load_weights(self, ticket: WeightTicket) -> str:
        """Replace the weights by those of ``ticket``; the digest of what vLLM's workers received.

        Raises:
            RuntimeError: The digest is not the ticket's. The engine samples no more.
            ValueError: Names, shapes or dtypes don't fit. The engine samples no more.
        """
        if ticket.adapter is not None and ticket.adapter != self._trained_name:
            raise ValueError(f"The vLLM engine trains no adapter {ticket.adapter!r}.")
        async with self._update_lock, self._telling_of_death():
            if self._is_asleep:
                return await self._wake_with(ticket)
            if ticket.method in _AT_ONCE and self._running == 0:
                return await self._replace_at_once(ticket)
            was_paused = await self._ready.is_paused()
            mode = "keep" if was_paused else _PAUSE_MODES[self._settings.update_mode]
            self._may_start.clear()
            await self._ready.pause_generation(mode=cast(Any, mode), clear_cache=mode != "keep")
            try:
                return await self._replace(ticket)
            finally:
                if not was_paused and not self._ready.errored:
                    await self._ready.resume_generation()
                    self._may_start.set()

    async def _replace_at_once(self, ticket: WeightTicket) -> str:
        """Without a pause: nothing runs, and what comes meanwhile waits here."""
        was_open = self._may_start.is_set() or self._lacks_weights
        self._may_start.clear()
        try:
            return await self._replace(ticket)
        finally:
            if was_open:
                self._may_start.set()

    async def sleep(self) -> None:
        """Give the GPU's memory to others until `wake` or new weights; nothing may be running."""
        async with self._update_lock, self._telling_of_death():
            if not self._is_asleep:
                self._may_start.clear()
                await self._ready.sleep(level=1)
                self._is_asleep = True

    async def wake(self) -> None:
        """End `sleep`, with the weights that were there before."""
        async with self._update_lock, self._telling_of_death():
            if self._is_asleep:
                await self._ready.wake_up()
                self._is_asleep = False
                self._may_start.set()

    async def _wake_with(self, ticket: WeightTicket) -> str:
        """End `sleep` with new weights; the cache gets its memory once they are in place."""
        await self._ready.wake_up(["weights"])
        digest = await self._replace(ticket)
        await self._ready.wake_up(["kv_cache"])
        self._is_asleep = False
        self._may_start.set()
        return digest

    async def _replace(self, ticket: WeightTicket) -> str:
        try:
            assert self._receiver is not None, "an engine that is ready has one"
            digest, version = await self._receiver.receive(ticket)
        except Exception as error:  # the boundary of an update: its caller gets the error
            self._broken = error
            raise
        self._version, self._broken = version, None
        self._has_updates, self._lacks_weights = True, False
        return digest

    async def adapters(self) -> list[NamedAdapter]:
        """Those that requests may name now, in the order in which they came."""
        return self._named.known

    async def load_adapter(self, adapter: NamedAdapter) -> None:
        """Have one more; requests go on meanwhile. While the engine sleeps or pauses, it waits.

        Raises:
            ValueError: The name is taken, or the files are missing or don't fit the model.
        """
        if not self._settings.has_named_adapters:
            raise ValueError("The engine was not started for adapters that requests name.")
        async with self._awake():
            await self._load_named(adapter, self._ready)

    async def unload_adapter(self, name: str) -> None:
        """Have it no longer; what runs on it ends first. `LookupError` if there is none."""
        loaded = self._named.remove(name)
        await loaded.is_idle.wait()
        async with self._awake():
            await self._ready.remove_lora(loaded.request.lora_int_id)
        self._named.discard(loaded.request)

    @contextlib.asynccontextmanager
    async def _awake(self) -> AsyncIterator[None]:
        """Within, vLLM has its memory, which adapters lie in too, and no weights change."""
        while True:
            await self._may_start.wait()
            async with self._update_lock, self._telling_of_death():
                if not self._is_asleep:  # which it may be since
                    yield
                    return

    async def pause(self) -> None:
        """Finish no further step until `resume`; requests wait."""
        async with self._telling_of_death():
            self._may_start.clear()
            await self._ready.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        async with self._telling_of_death():
            await self._ready.resume_generation()
            self._may_start.set()

    async def version(self) -> int:
        """Version of the weights that sample now."""
        return self._version

    async def health(self) -> dict[str, float]:
        """Figures for the log; `ProcessDied` if vLLM's process has ended."""
        if self._ready.errored:
            raise self._death()
        return {
            "running": self._running,
            "waiting": 0,
            "tokens": self._num_tokens,
            "version": self._version,
        }

    async def close(self) -> None:
        """End vLLM's processes."""
        self._is_closed = True
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
            self._llm = None
        self._may_start.set()  # those that wait are told
        self._folder.cleanup()
        self._named.cleanup()
        if self._adapter is not None:
            self._adapter.cleanup()

    # Sampling

    @property
    def _ready(self) -> AsyncLLM:
        if self._llm is None:
            if self._num_restarts and not self._is_closed:
                raise self._death()
            raise RuntimeError("The engine is not ready: await prepare() first.")
        return self._llm

    @property
    def _trained_name(self) -> str | None:
        return None if self._adapter is None else self._adapter.name

    def _lora_of(self, adapter: str | None) -> LoRARequest | None:
        """What requests for ``adapter`` are sent with; `ValueError` if there is no such one."""
        if adapter is None or adapter == self._trained_name:
            return None if self._adapter is None else self._adapter.request
        found = self._named.request(adapter)
        if found is None:
            raise ValueError(f"The vLLM engine has no adapter {adapter!r}.")
        return found

    def _require_sound(self) -> None:
        if self._ready.errored:
            raise self._death()
        if self._broken is not None:
            raise RuntimeError(f"The engine stopped: {self._broken}") from self._broken

    async def _some(
        self, prompt: "_Prompt", params: SamplingParams, indices: range, room: int
    ) -> list[Completion]:
        """Samples of one prompt; those that an update aborts are begun anew."""
        done: list[Completion] = []
        while len(done) < len(indices):
            await self._may_start.wait()
            left = indices[len(done) :]
            samples = [Completion([], [], "abort") for _ in left]
            if params.request_id is not None:
                self._partial.setdefault(params.request_id, {})[left[0]] = samples[0]
            asked = vllm_params(params, left, room, self._settings)
            await self._complete_inplace(samples, prompt, asked)
            done += [sample for sample in samples if sample.finish_reason != "abort"]
        self._num_tokens += sum(len(sample.token_ids) for sample in done)
        return done

    async def _complete_inplace(
        self, samples: list[Completion], prompt: "_Prompt", asked: VLLMParams
    ) -> None:
        self._running += 1
        try:
            async for output in self._outputs(prompt, asked):
                for part in output.outputs:
                    sample = samples[part.index]
                    sample.token_ids += part.token_ids
                    sample.logprobs += logprobs_of(part)
                    sample.versions += [self._version] * len(part.token_ids)
                    sample.finish_reason = finish_reason(part)
        finally:
            self._running -= 1

    async def _outputs(self, prompt: "_Prompt", asked: VLLMParams) -> AsyncIterator[RequestOutput]:
        async with self._telling_of_death():
            async for output in self._ready.generate(
                prompt.for_vllm(self._version),
                asked,
                f"r{next(self._ids)}",
                lora_request=prompt.lora,
            ):
                yield output

    def _warn_of_cuts(self, params: SamplingParams) -> None:
        if is_cut(params) and not self._has_warned:
            self._has_warned = True
            self._log.warning(
                "top_p, top_k, min_p or min tokens are set: vLLM's logprobs are those after the "
                "cut, so importance ratios are not 1 even on the same weights."
            )

    async def _scored(self, prompt: "_Prompt", temperature: float) -> list[float] | None:
        """Logprob of each token but the first; None if an update aborted a request."""
        ids = prompt.ids
        self._running += 1
        try:
            if temperature in (0, 1.0):
                return await self._prompt_logprobs(prompt)
            jobs = [
                self._next_logprob(prompt._replace(ids=ids[:k]), ids[k], temperature)
                for k in range(1, len(ids))
            ]
            found = await asyncio.gather(*jobs)
            return None if None in found else [logprob for logprob in found if logprob is not None]
        finally:
            self._running -= 1

    async def _prompt_logprobs(self, prompt: "_Prompt") -> list[float] | None:
        ids = prompt.ids
        if len(ids) < 2:
            return []
        asked = VLLMParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
        found: list[Any] = []
        # vLLM makes room for the one token that it samples: the last one is left to itself.
        whole = ids if len(ids) < self._max_model_len else ids[:-1]
        scored = prompt._replace(ids=whole)
        async for output in self._outputs(scored, asked):
            found = output.prompt_logprobs or found
        if len(found) < len(whole):
            return None
        logprobs = [entry[token].logprob for entry, token in zip(found[1:], whole[1:], strict=True)]
        if len(whole) < len(ids):
            last = await self._next_logprob(scored, ids[-1], 1.0)
            return None if last is None else [*logprobs, last]
        return logprobs

    async def _next_logprob(
        self, before: "_Prompt", token: int, temperature: float
    ) -> float | None:
        asked = VLLMParams(
            max_tokens=1, temperature=temperature, logprob_token_ids=[token], detokenize=False
        )
        logprob = None
        async for output in self._outputs(before, asked):
            for entry in output.outputs[0].logprobs or []:
                logprob = entry[token].logprob
        return logprob

    # Deaths

    @contextlib.asynccontextmanager
    async def _telling_of_death(self) -> AsyncIterator[None]:
        """Within, the end of vLLM's process is a `ProcessDied`; requests that wait get it too."""
        try:
            yield
        except EngineDeadError as error:
            self._may_start.set()
            raise self._death() from error

    def _death(self) -> ProcessDied:
        if self._num_restarts < _MAX_RESTARTS or self._llm is None:
            return ProcessRestarted("vLLM's process has ended; it is started again.")
        return ProcessDied(f"vLLM's process has ended, the {_MAX_RESTARTS + 1}th time.")


def _adapter_of(settings: VLLMEngineSettings) -> ServedAdapter | None:
    if settings.adapter is None:
        return None
    return ServedAdapter(settings.adapter, settings.model_path, settings.trust_remote_code)


class _Prompt(NamedTuple):
    """Tokens, and what of vLLM's they go through; the number of an adapter is never used again."""

    ids: list[int]
    lora: LoRARequest | None

    def for_vllm(self, version: int) -> Any:
        """The salt keeps keys and values of other weights out of a request's prefix."""
        adapter = "" if self.lora is None else f"-{self.lora.lora_int_id}"
        return {"prompt_token_ids": self.ids, "cache_salt": f"version-{version}{adapter}"}


async def _load_first(adapter: ServedAdapter, llm: AsyncLLM) -> None:
    try:
        await llm.add_lora(adapter.update)
    except Exception as error:  # vLLM raises all kinds
        raise ValueError(
            f"vLLM can't serve the adapter {adapter.name!r} (model.lora_configs): {error} "
            "Name other target_modules, or set explorer.rollout_model.engine_type to torch."
        ) from error
