"""`VLLMEngine`: vLLM's `AsyncLLM` behind the face of an `InferenceEngine`."""

import asyncio
import contextlib
import itertools
import os
import tempfile
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load
from vllm import SamplingParams as VLLMParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from trinity.common.models.loading import (
    has_weights,
    load_causal_lm,
    load_tokenizer,
)
from trinity.common.models.protocol import (
    Completion,
    FinishReason,
    SamplingParams,
    WeightTicket,
)
from trinity.engine.vllm.adapter import ServedAdapter
from trinity.engine.vllm.causes import telling_the_first_cause
from trinity.engine.vllm.compat import choose_model_runner, own_scheduler, seeds_on_cpu
from trinity.engine.vllm.memory import explaining_failure
from trinity.engine.vllm.settings import VLLMEngineSettings
from trinity.engine.vllm.shipping import Shapes, expected_shapes, ticket_files
from trinity.engine.vllm.transfer import BACKEND, EXTENSION
from trinity.synchronizer import ipc, nccl
from trinity.synchronizer.channel import open_weights
from trinity.utils.actor import ProcessDied, ProcessRestarted
from trinity.utils.log import get_logger

_AT_ONCE = (nccl.METHOD, ipc.METHOD)
"""Channels whose weights all change between two steps of vLLM's."""

_PAUSE_MODES = {"pause": "wait", "keep": "keep", "abort": "abort"}
_CPU_CACHE_BYTES = 2**30
_MAX_RESTARTS = 3  # of vLLM's process; one more death is final
_GREEDY_BELOW = 1e-5  # a temperature


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
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._shapes: Shapes = {}
        self._dtype = torch.float32
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
        self._group = _new_group()
        self._base: int | None = None
        self._has_warned = False
        self._partial: dict[str, dict[int, Completion]] = {}
        self._log = get_logger("engine")

    async def prepare(self) -> None:
        """Start vLLM and wait until it is ready to sample; if its process died, start it anew."""
        if self._llm is not None:
            if not self._llm.errored:
                return
            await self._bury(self._llm)
        llm = await asyncio.to_thread(self._start)
        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        self._max_model_len = llm.vllm_config.model_config.max_model_len
        if self._adapter is not None:
            await self._load_first(self._adapter, llm)
        self._llm = llm
        if not self._lacks_weights:
            self._may_start.set()

    async def _bury(self, llm: AsyncLLM) -> None:
        """Forget all that was in a process that died."""
        self._num_restarts += 1
        self._may_start.clear()
        self._llm, self._broken, self._is_asleep = None, None, False
        self._base = None
        self._group = _new_group()
        self._version, self._lacks_weights = self._settings.version, self._has_updates
        await asyncio.to_thread(llm.shutdown)

    async def _load_first(self, adapter: ServedAdapter, llm: AsyncLLM) -> None:
        await asyncio.to_thread(adapter.prepare, self._dtype)
        try:
            await llm.add_lora(adapter.update)
        except Exception as error:  # vLLM raises all kinds
            llm.shutdown()
            raise ValueError(
                f"vLLM can't serve the adapter {adapter.name!r} (model.lora_configs): {error} "
                "Name other target_modules, or set explorer.rollout_model.engine_type to torch."
            ) from error

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str | None = None
    ) -> list[Completion]:
        """``params.n`` samples of one prompt, in order of their index.

        Raises:
            ValueError: The prompt is empty or leaves no room for a new token.
            ProcessDied: vLLM's process has ended.
        """
        self._refuse_other_adapter(adapter)
        self._require_sound()
        room = self._max_model_len - len(prompt_ids)
        if not len(prompt_ids) or room < 1:
            raise ValueError(
                f"The prompt has {len(prompt_ids)} tokens; it must have at least 1 and at most "
                f"max_model_len - 1 = {self._max_model_len - 1}."
            )
        self._warn_of_cuts(params)
        jobs = [self._some(list(prompt_ids), params, part, room) for part in self._parts(params)]
        try:
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

        vLLM scores whole prompts at temperature 1 only; at another one every token is asked for
        on its own, which costs a request each.
        """
        self._refuse_other_adapter(adapter)
        self._require_sound()
        ids = list(token_ids)
        if temperature in (0, 1.0):
            return await self._prompt_logprobs(ids)
        jobs = [self._next_logprob(ids[:k], ids[k], temperature) for k in range(1, len(ids))]
        return list(await asyncio.gather(*jobs))

    async def load_weights(self, ticket: WeightTicket) -> str:
        """Replace the weights by those of ``ticket``; the digest of what vLLM's workers received.

        Raises:
            RuntimeError: The digest is not the ticket's. The engine samples no more.
            ValueError: Names, shapes or dtypes don't fit. The engine samples no more.
        """
        self._refuse_other_adapter(ticket.adapter)
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
            digest, version = await self._receive(ticket)
        except Exception as error:  # the boundary of an update: its caller gets the error
            self._broken = error
            raise
        self._version, self._broken = version, None
        self._has_updates, self._lacks_weights = True, False
        return digest

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
        for folder in (self._folder, self._adapter):
            if folder is not None:
                folder.cleanup()

    # Starting

    def _start(self) -> AsyncLLM:
        # vLLM forks otherwise where it can, which threads of this process would not survive.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        choose_model_runner(self._settings)
        path = self._folder_with_weights()
        self._shapes = expected_shapes(path, self._settings.trust_remote_code)
        given = self._engine_args(path)
        with explaining_failure(self._settings), telling_the_first_cause():
            arguments = AsyncEngineArgs(**given)
            llm = AsyncLLM.from_engine_args(arguments, usage_context=_usage())
        self._dtype = llm.vllm_config.model_config.dtype
        return llm

    def _engine_args(self, path: str) -> dict[str, Any]:
        settings = self._settings
        arguments: dict[str, Any] = {
            "model": path,
            "tokenizer": settings.model_path,
            "dtype": settings.dtype,
            "seed": settings.seed,
            "max_model_len": settings.max_model_len,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "pipeline_parallel_size": settings.pipeline_parallel_size,
            "data_parallel_size": settings.data_parallel_size,
            "enable_expert_parallel": settings.enable_expert_parallel,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "enforce_eager": settings.enforce_eager,
            "enable_prefix_caching": settings.enable_prefix_caching,
            "enable_chunked_prefill": settings.enable_chunked_prefill,
            "enable_log_requests": settings.enable_log_requests,
            "trust_remote_code": settings.trust_remote_code,
            "hf_overrides": dict(settings.config_overrides),
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
            "worker_extension_cls": EXTENSION,
            "disable_log_stats": True,
            "enable_sleep_mode": settings.sleeps,
        }
        cache = settings.kv_cache_bytes
        if cache is None and current_platform.is_cpu():
            cache = _CPU_CACHE_BYTES
        if cache is not None:
            arguments["kv_cache_memory_bytes"] = cache
        if self._adapter is not None:
            arguments |= self._adapter.engine_arguments(
                settings.max_cpu_loras, settings.fully_sharded_loras
            )
        of_version = own_scheduler() | seeds_on_cpu(settings)
        return arguments | of_version | dict(settings.extra_engine_args)

    def _folder_with_weights(self) -> str:
        """The model's folder; one with random weights if it has none."""
        settings = self._settings
        if not Path(settings.model_path).is_dir() or has_weights(settings.model_path):
            return settings.model_path
        if self._folder is not None:
            return self._folder.name
        self._log.warning(
            "%s holds no weights: initialised at random with seed %d.",
            settings.model_path,
            settings.init_seed,
        )
        self._folder = tempfile.TemporaryDirectory(prefix="trinity_model_")
        model, _ = load_causal_lm(settings.model_path, settings.dtype, settings.init_seed)
        model.save_pretrained(self._folder.name)
        load_tokenizer(settings.model_path).save_pretrained(self._folder.name)
        return self._folder.name

    # Sampling

    @property
    def _ready(self) -> AsyncLLM:
        if self._llm is None:
            if self._num_restarts and not self._is_closed:
                raise self._death()
            raise RuntimeError("The engine is not ready: await prepare() first.")
        return self._llm

    def _require_sound(self) -> None:
        if self._ready.errored:
            raise self._death()
        if self._broken is not None:
            raise RuntimeError(f"The engine stopped: {self._broken}") from self._broken

    def _parts(self, params: SamplingParams) -> list[range]:
        """Indices of the samples that make one request of vLLM's each.

        All are one, if none has a seed of its own and nobody follows their tokens. Of greedy ones
        vLLM takes one at a time.
        """
        is_greedy = params.temperature < _GREEDY_BELOW
        if self._seed(params, 0) is None and not self._is_tagged(params) and not is_greedy:
            return [range(params.n)]
        return [range(index, index + 1) for index in range(params.n)]

    async def _some(
        self, ids: list[int], params: SamplingParams, indices: range, room: int
    ) -> list[Completion]:
        """Samples of one prompt; those that an update aborts are begun anew."""
        done: list[Completion] = []
        while len(done) < len(indices):
            await self._may_start.wait()
            left = indices[len(done) :]
            samples = [Completion([], [], "abort") for _ in left]
            if params.request_id is not None:
                self._partial.setdefault(params.request_id, {})[left[0]] = samples[0]
            await self._complete_inplace(samples, ids, self._vllm_params(params, left, room))
            done += [sample for sample in samples if sample.finish_reason != "abort"]
        self._num_tokens += sum(len(sample.token_ids) for sample in done)
        return done

    async def _complete_inplace(
        self, samples: list[Completion], ids: list[int], asked: VLLMParams
    ) -> None:
        self._running += 1
        try:
            async for output in self._outputs(ids, asked):
                for part in output.outputs:
                    sample = samples[part.index]
                    sample.token_ids += part.token_ids
                    sample.logprobs += _chosen(part)
                    sample.versions += [self._version] * len(part.token_ids)
                    sample.finish_reason = _finish_reason(part)
        finally:
            self._running -= 1

    async def _outputs(self, ids: list[int], asked: VLLMParams) -> AsyncIterator[RequestOutput]:
        # The salt keeps keys and values of other weights out of a request's prefix.
        prompt: Any = {"prompt_token_ids": ids, "cache_salt": f"version-{self._version}"}
        adapter = None if self._adapter is None else self._adapter.request
        async with self._telling_of_death():
            async for output in self._ready.generate(
                prompt, asked, f"r{next(self._ids)}", lora_request=adapter
            ):
                yield output

    def _seed(self, params: SamplingParams, index: int) -> int | None:
        if params.seed is None or not self._settings.keeps_seeds:
            return None
        return (params.seed * 1_000_003 + index) % 2**63

    def _is_tagged(self, params: SamplingParams) -> bool:
        """Whether tokens are looked at as they come."""
        return self._settings.update_mode == "keep" or params.request_id is not None

    def _vllm_params(self, params: SamplingParams, indices: range, room: int) -> VLLMParams:
        is_tagged = self._is_tagged(params)
        return VLLMParams(
            n=len(indices),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            min_p=params.min_p,
            max_tokens=min(room, params.max_tokens or room),
            min_tokens=params.min_tokens,
            stop=list(params.stop) or None,
            stop_token_ids=list(params.stop_token_ids) or None,
            seed=self._seed(params, indices[0]),
            repetition_penalty=params.repetition_penalty,
            ignore_eos=params.ignore_eos,
            logprobs=0,
            flat_logprobs=not is_tagged,  # no dictionary for each token; has no empty parts
            detokenize=bool(params.stop),
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            output_kind=RequestOutputKind.DELTA if is_tagged else RequestOutputKind.FINAL_ONLY,
        )

    def _warn_of_cuts(self, params: SamplingParams) -> None:
        is_cut = params.top_p < 1 or params.top_k > 0 or params.min_p > 0 or params.min_tokens > 0
        if is_cut and not self._has_warned:
            self._has_warned = True
            self._log.warning(
                "top_p, top_k, min_p or min tokens are set: vLLM's logprobs are those after the "
                "cut, so importance ratios are not 1 even on the same weights."
            )

    async def _prompt_logprobs(self, ids: list[int]) -> list[float]:
        if len(ids) < 2:
            return []
        asked = VLLMParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
        await self._may_start.wait()
        found: list[Any] = []
        # vLLM makes room for the one token that it samples: the last one is left to itself.
        whole = ids if len(ids) < self._max_model_len else ids[:-1]
        async for output in self._outputs(whole, asked):
            found = output.prompt_logprobs or found
        scored = [entry[token].logprob for entry, token in zip(found[1:], whole[1:], strict=True)]
        if len(whole) < len(ids):
            scored.append(await self._next_logprob(whole, ids[-1], 1.0))
        return scored

    async def _next_logprob(self, before: list[int], token: int, temperature: float) -> float:
        asked = VLLMParams(
            max_tokens=1, temperature=temperature, logprob_token_ids=[token], detokenize=False
        )
        await self._may_start.wait()
        logprob = float("nan")
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

    # Weights

    def _refuse_other_adapter(self, adapter: str | None) -> None:
        if adapter is not None and (self._adapter is None or self._adapter.name != adapter):
            raise ValueError(f"The vLLM engine has no adapter {adapter!r}.")

    async def _receive(self, ticket: WeightTicket) -> tuple[str, int]:
        """Digest and version of what then is in place."""
        base, self._base = self._base, None
        if self._adapter is not None:
            return await self._receive_adapter(self._adapter, ticket), ticket.version
        if ticket.method == nccl.METHOD:
            return await self._receive_by_nccl(cast(nccl.Meeting, ticket.payload), base)
        if ticket.method == ipc.METHOD:
            found = await self._ready.collective_rpc("receive_by_ipc", args=(ticket.payload,))
            return _the_one(found, ticket), ticket.version
        return await self._receive_files(ticket), ticket.version

    async def _receive_by_nccl(self, meeting: nccl.Meeting, base: int | None) -> tuple[str, int]:
        settings = self._settings
        num_workers = settings.tensor_parallel_size * settings.pipeline_parallel_size
        request = await asyncio.to_thread(nccl.ask, meeting, self._group, num_workers, base)
        arguments = (asdict(meeting), request, self._group, num_workers, base is not None)
        found = await self._ready.collective_rpc("receive_by_nccl", args=arguments)
        digest, version, _ = found[0]
        if meeting.sends_delta and all(can_change for _, _, can_change in found):
            self._base = int(version)
        return str(digest), int(version)

    async def _receive_adapter(self, adapter: ServedAdapter, ticket: WeightTicket) -> str:
        if ticket.method == ipc.METHOD:
            found = await self._ready.collective_rpc("fetch_by_ipc", args=(ticket.payload,))
            weights = iter(load(found[0]).items())
        else:
            weights = open_weights(ticket)
        await asyncio.to_thread(adapter.write, weights, self._dtype)
        arguments = (str(adapter.folder), adapter.name)
        digests = await self._ready.collective_rpc("adapter_digest", args=arguments)
        await self._ready.add_lora(adapter.update)
        return _the_one(digests, ticket)

    async def _receive_files(self, ticket: WeightTicket) -> str:
        llm = self._ready
        files = ticket_files(ticket, self._shapes, self._dtype)
        with contextlib.closing(files):
            found = await asyncio.to_thread(next, files, None)
            await llm.start_weight_update()
            try:
                while found is not None:
                    path, is_first = found
                    update = {"path": path, "is_first": is_first}
                    await llm.update_weights(WeightTransferUpdateRequest(update_info=update))
                    found = await asyncio.to_thread(next, files, None)
            except Exception:
                with contextlib.suppress(Exception):  # what went wrong first is what counts
                    await llm.finish_weight_update()
                raise
            await llm.finish_weight_update()
        return _the_one(await llm.collective_rpc("received_digest"), ticket)


def _the_one(digests: Sequence[str], ticket: WeightTicket) -> str:
    """The digest that all workers report, which must be the ticket's."""
    if ticket.digest and set(digests) != {ticket.digest}:
        raise RuntimeError(
            f"After loading version {ticket.version} vLLM's workers report the digests "
            f"{sorted(set(digests))}, but the trainer sent {ticket.digest}."
        )
    return str(digests[0])


def _usage() -> UsageContext:
    """How many requests vLLM runs at a time goes by what it is used for; by itself it is 128."""
    is_cpu = current_platform.is_cpu()
    return UsageContext.ENGINE_CONTEXT if is_cpu else UsageContext.OPENAI_API_SERVER


def _new_group() -> str:
    """Name of an engine's processes among all that take weights by NCCL."""
    return f"engine_{uuid.uuid4().hex[:12]}"


def _adapter_of(settings: VLLMEngineSettings) -> ServedAdapter | None:
    if settings.adapter is None:
        return None
    return ServedAdapter(settings.adapter, settings.model_path, settings.trust_remote_code)


def _chosen(part: CompletionOutput) -> list[float]:
    """Logprob of each token of an output; vLLM puts the token that was sampled first."""
    entries = part.logprobs
    if isinstance(entries, FlatLogprobs):
        return [entries.logprobs[start] for start in entries.start_indices]
    return [
        entry[token].logprob for entry, token in zip(entries or [], part.token_ids, strict=True)
    ]


def _finish_reason(part: CompletionOutput) -> FinishReason:
    if part.finish_reason in ("stop", "length"):
        return cast(FinishReason, part.finish_reason)
    return "abort"
