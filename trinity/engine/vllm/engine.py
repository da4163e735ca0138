"""`VLLMEngine`: vLLM's `AsyncLLM` behind the face of an `InferenceEngine`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.lora.request import LoRARequest
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
from trinity.engine.vllm.process import VLLMProcess
from trinity.engine.vllm.requests import Prompt, Requests
from trinity.engine.vllm.settings import VLLMEngineSettings
from trinity.engine.vllm.shipping import expected_shapes
from trinity.engine.vllm.starting import ModelFolder, start_llm
from trinity.engine.vllm.updates import WeightReceiver
from trinity.synchronizer import ipc, nccl
from trinity.utils.log import get_logger

_AT_ONCE = (nccl.METHOD, ipc.METHOD)
"""Channels whose weights all change between two steps of vLLM's."""

_PAUSE_MODES = {"pause": "wait", "keep": "keep", "abort": "abort"}


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
        self._process = VLLMProcess(settings.version)
        self._requests = Requests(self._process, settings)
        self._folder = ModelFolder(settings, get_logger("engine"))
        self._named = NamedAdapters(self._adapter)
        self._receiver: WeightReceiver | None = None
        self._update_lock = asyncio.Lock()
        self._is_asleep = False

    async def prepare(self) -> None:
        """Start vLLM and wait until it is ready to sample; if its process died, start it anew."""
        if self._process.is_started:
            if not self._process.llm.errored:
                return
            self._is_asleep = False
            await self._process.bury()
        path = await asyncio.to_thread(self._folder.path)
        llm = await asyncio.to_thread(start_llm, self._settings, path, self._adapter)
        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        self._receiver = await asyncio.to_thread(self._receiver_for, llm, path)
        await self._load_adapters(llm)
        self._process.begin(llm)

    def _receiver_for(self, llm: AsyncLLM, path: str) -> WeightReceiver:
        settings = self._settings
        shapes = expected_shapes(path, settings.trust_remote_code)
        num_workers = settings.tensor_parallel_size * settings.pipeline_parallel_size
        dtype = llm.vllm_config.model_config.dtype
        return WeightReceiver(llm, shapes, dtype, num_workers, self._adapter, settings.name)

    async def _load_adapters(self, llm: AsyncLLM) -> None:
        """The one to be trained, and those of the settings beside it.

        After a restart vLLM reads the others again when they are first asked for.
        """
        try:
            if self._adapter is not None:
                await asyncio.to_thread(self._adapter.prepare, llm.vllm_config.model_config.dtype)
                await _load_first(self._adapter, llm)
            for adapter in self._settings.named_adapters if not self._process.was_restarted else ():
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
        self._process.require_sound()
        with self._named.in_use(lora):
            return await self._requests.sample(Prompt(list(prompt_ids), lora), params)

    async def partial(self, request_id: str) -> list[list[int]]:
        """New tokens so far of each sample of a running request; [] if none are known."""
        return self._requests.partial(request_id)

    async def logprobs(
        self, token_ids: Sequence[int], temperature: float = 1.0, adapter: str | None = None
    ) -> list[float]:
        """Log-probability of each token given those before it: ``len(token_ids) - 1`` values.

        All are of the same weights: what new ones fall into is asked for again. vLLM scores whole
        prompts at temperature 1 only; at another one every token is asked for on its own, which
        costs a request each.
        """
        lora = self._lora_of(adapter)
        self._process.require_sound()
        with self._named.in_use(lora):
            return await self._requests.logprobs(Prompt(list(token_ids), lora), temperature)

    async def load_weights(self, ticket: WeightTicket) -> str:
        """Replace the weights by those of ``ticket``; the digest of what vLLM's workers received.

        Raises:
            RuntimeError: The digest is not the ticket's. The engine samples no more.
            ValueError: Names, shapes or dtypes don't fit. The engine samples no more.
        """
        if ticket.adapter is not None and ticket.adapter != self._trained_name:
            raise ValueError(f"The vLLM engine trains no adapter {ticket.adapter!r}.")
        async with self._update_lock, self._process.telling_of_death():
            if self._is_asleep:
                return await self._wake_with(ticket)
            if ticket.method in _AT_ONCE and self._requests.num_running == 0:
                return await self._replace_at_once(ticket)
            was_paused = await self._process.llm.is_paused()
            mode = "keep" if was_paused else _PAUSE_MODES[self._settings.update_mode]
            self._process.may_start.clear()
            await self._process.llm.pause_generation(
                mode=cast(Any, mode), clear_cache=mode != "keep"
            )
            try:
                return await self._replace(ticket)
            finally:
                if not was_paused and not self._process.llm.errored:
                    await self._process.llm.resume_generation()
                    self._process.may_start.set()

    async def _replace_at_once(self, ticket: WeightTicket) -> str:
        """Without a pause: nothing runs, and what comes meanwhile waits here."""
        was_open = self._process.may_start.is_set() or self._process.lacks_weights
        self._process.may_start.clear()
        try:
            return await self._replace(ticket)
        finally:
            if was_open:
                self._process.may_start.set()

    async def sleep(self) -> None:
        """Give the GPU's memory to others until `wake` or new weights; nothing may be running."""
        async with self._update_lock, self._process.telling_of_death():
            if not self._is_asleep:
                self._process.may_start.clear()
                await self._process.llm.sleep(level=1)
                self._is_asleep = True

    async def wake(self) -> None:
        """End `sleep`, with the weights that were there before."""
        async with self._update_lock, self._process.telling_of_death():
            if self._is_asleep:
                await self._process.llm.wake_up()
                self._is_asleep = False
                self._process.may_start.set()

    async def _wake_with(self, ticket: WeightTicket) -> str:
        """End `sleep` with new weights; the cache gets its memory once they are in place."""
        await self._process.llm.wake_up(["weights"])
        digest = await self._replace(ticket)
        await self._process.llm.wake_up(["kv_cache"])
        self._is_asleep = False
        self._process.may_start.set()
        return digest

    async def _replace(self, ticket: WeightTicket) -> str:
        try:
            assert self._receiver is not None, "an engine that is ready has one"
            digest, version = await self._receiver.receive(ticket)
        except Exception as error:  # the boundary of an update: its caller gets the error
            self._process.broken = error
            raise
        self._process.loaded(version)
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
            await self._load_named(adapter, self._process.llm)

    async def unload_adapter(self, name: str) -> None:
        """Have it no longer; what runs on it ends first. `LookupError` if there is none."""
        loaded = self._named.remove(name)
        await loaded.is_idle.wait()
        async with self._awake():
            await self._process.llm.remove_lora(loaded.request.lora_int_id)
        self._named.discard(loaded.request)

    @contextlib.asynccontextmanager
    async def _awake(self) -> AsyncIterator[None]:
        """Within, vLLM has its memory, which adapters lie in too, and no weights change."""
        while True:
            await self._process.may_start.wait()
            async with self._update_lock, self._process.telling_of_death():
                if not self._is_asleep:  # which it may be since
                    yield
                    return

    async def pause(self) -> None:
        """Finish no further step until `resume`; requests wait."""
        async with self._process.telling_of_death():
            self._process.may_start.clear()
            await self._process.llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        async with self._process.telling_of_death():
            await self._process.llm.resume_generation()
            self._process.may_start.set()

    async def version(self) -> int:
        """Version of the weights that sample now."""
        return self._process.version

    async def health(self) -> dict[str, float]:
        """Figures for the log; `ProcessDied` if vLLM's process has ended."""
        self._process.require_alive()
        return {
            "running": self._requests.num_running,
            "waiting": 0,
            "tokens": self._requests.num_tokens,
            "version": self._process.version,
        }

    async def close(self) -> None:
        """End vLLM's processes."""
        await self._process.close()
        self._folder.cleanup()
        self._named.cleanup()
        if self._adapter is not None:
            self._adapter.cleanup()

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


def _adapter_of(settings: VLLMEngineSettings) -> ServedAdapter | None:
    if settings.adapter is None:
        return None
    return ServedAdapter(settings.adapter, settings.model_path, settings.trust_remote_code)


async def _load_first(adapter: ServedAdapter, llm: AsyncLLM) -> None:
    try:
        await llm.add_lora(adapter.update)
    except Exception as error:  # vLLM raises all kinds
        raise ValueError(
            f"vLLM can't serve the adapter {adapter.name!r} (model.lora_configs): {error} "
            "Name other target_modules, or set explorer.rollout_model.engine_type to torch."
        ) from error
