"""Samples and logprobs of prompts, as requests to vLLM's process."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from vllm import SamplingParams as VLLMParams
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput

from trinity.common.models.prompts import require_known, room_behind
from trinity.common.models.protocol import Completion, SamplingParams
from trinity.engine.vllm.process import VLLMProcess
from trinity.engine.vllm.sampling import (
    finish_reason,
    is_cut,
    logprobs_of,
    parts,
    routes_of,
    vllm_params,
)
from trinity.engine.vllm.settings import VLLMEngineSettings
from trinity.utils.log import get_logger


class Prompt(NamedTuple):
    """Tokens, and what of vLLM's they go through; the number of an adapter is never used again."""

    ids: list[int]
    lora: LoRARequest | None

    def for_vllm(self, version: int) -> Any:
        """The salt keeps keys and values of other weights out of a request's prefix."""
        adapter = "" if self.lora is None else f"-{self.lora.lora_int_id}"
        return {"prompt_token_ids": self.ids, "cache_salt": f"version-{version}{adapter}"}


class Requests:
    """Those of one engine. What new weights cut short is asked for again.

    Attributes:
        num_running: Requests under way at vLLM.
        num_tokens: New tokens so far.
    """

    def __init__(self, process: VLLMProcess, settings: VLLMEngineSettings) -> None:
        self._process = process
        self._settings = settings
        self._ids = itertools.count()
        self._partial: dict[str, dict[int, Completion]] = {}
        self._has_warned = False
        self.num_running = 0
        self.num_tokens = 0

    async def sample(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        """``params.n`` samples of one prompt, in order of their index.

        Raises:
            ValueError: The prompt is empty, leaves no room for a new token, or has one that the
                model does not know.
        """
        room = room_behind(prompt.ids, self._process.max_model_len)
        for ids in (prompt.ids, params.stop_token_ids):
            require_known(ids, self._process.vocabulary_size)
        self._warn_of_cuts(params)
        indices = parts(params, self._settings)
        jobs = [self._some(prompt, params, part, room) for part in indices]
        try:
            return [sample for part in await asyncio.gather(*jobs) for sample in part]
        finally:
            self._partial.pop(params.request_id or "", None)

    def partial(self, request_id: str) -> list[list[int]]:
        """New tokens so far of each sample of a running request; [] if none are known."""
        samples = self._partial.get(request_id, {})
        return [list(sample.token_ids) for _, sample in sorted(samples.items())]

    async def logprobs(self, prompt: Prompt, temperature: float) -> list[float]:
        """Logprob of each token but the first, all of the same weights."""
        process = self._process
        require_known(prompt.ids, process.vocabulary_size)
        while True:
            await process.may_start.wait()
            process.require_sound()
            version = process.version
            found = await self._scored(prompt, temperature)
            if found is not None and process.version == version:
                return found

    async def _some(
        self, prompt: Prompt, params: SamplingParams, indices: range, room: int
    ) -> list[Completion]:
        """Samples of one prompt; those that an update aborts are begun anew."""
        done: list[Completion] = []
        while len(done) < len(indices):
            await self._process.may_start.wait()
            left = indices[len(done) :]
            samples = [Completion([], [], "abort") for _ in left]
            if params.request_id is not None:
                self._partial.setdefault(params.request_id, {})[left[0]] = samples[0]
            asked = vllm_params(params, left, room, self._settings)
            await self._complete_inplace(samples, prompt, asked)
            done += [sample for sample in samples if sample.finish_reason != "abort"]
        self.num_tokens += sum(len(sample.token_ids) for sample in done)
        return done

    async def _complete_inplace(
        self, samples: list[Completion], prompt: Prompt, asked: VLLMParams
    ) -> None:
        self.num_running += 1
        try:
            async for output in self._outputs(prompt, asked):
                for part in output.outputs:
                    sample = samples[part.index]
                    sample.token_ids += part.token_ids
                    sample.logprobs += logprobs_of(part)
                    sample.versions += [self._process.version] * len(part.token_ids)
                    sample.finish_reason = finish_reason(part)
                    sample.routes = routes_of(part, len(prompt.ids) + len(sample.token_ids))
        finally:
            self.num_running -= 1

    async def _outputs(self, prompt: Prompt, asked: VLLMParams) -> AsyncIterator[RequestOutput]:
        process = self._process
        async with process.telling_of_death():
            async for output in process.llm.generate(
                prompt.for_vllm(process.version),
                asked,
                f"r{next(self._ids)}",
                lora_request=prompt.lora,
            ):
                yield output

    def _warn_of_cuts(self, params: SamplingParams) -> None:
        if is_cut(params) and not self._has_warned:
            self._has_warned = True
            get_logger("engine").warning(
                "top_p, top_k, min_p, repetition_penalty or min tokens are set: vLLM's logprobs "
                "are those after them, so importance ratios are not 1 even on the same weights."
            )

    async def _scored(self, prompt: Prompt, temperature: float) -> list[float] | None:
        """Logprob of each token but the first; None if an update aborted a request."""
        self.num_running += 1
        try:
            if temperature in (0, 1.0):
                return await self._prompt_logprobs(prompt)
            ids = prompt.ids
            jobs = [
                self._next_logprob(prompt._replace(ids=ids[:k]), ids[k], temperature)
                for k in range(1, len(ids))
            ]
            found = await asyncio.gather(*jobs)
            return None if None in found else [logprob for logprob in found if logprob is not None]
        finally:
            self.num_running -= 1

    async def _prompt_logprobs(self, prompt: Prompt) -> list[float] | None:
        ids = prompt.ids
        if len(ids) < 2:
            return []
        asked = VLLMParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
        found: list[Any] = []
        # vLLM makes room for the one token that it samples: the last one is left to itself.
        whole = ids if len(ids) < self._process.max_model_len else ids[:-1]
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

    async def _next_logprob(self, before: Prompt, token: int, temperature: float) -> float | None:
        asked = VLLMParams(
            max_tokens=1, temperature=temperature, logprob_token_ids=[token], detokenize=False
        )
        logprob = None
        async for output in self._outputs(before, asked):
            for entry in output.outputs[0].logprobs or []:
                logprob = entry[token].logprob
        return logprob
