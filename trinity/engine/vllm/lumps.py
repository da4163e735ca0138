"""Tokens leave vLLM's core many at a time where nobody reads them as they come.

For every token of every request vLLM's core makes a message, which the engine's process then opens
and adds up: in Python, and with logprobs in three arrays each. That takes longer than a small model
takes for the tokens. A request whose outputs are read only at its end loses nothing by messages of
many tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

NUM_TOKENS = 32  # of a message


class Step:
    """Logprobs of the tokens of one step, of all requests together.

    ``values`` and ``ranks`` are None where more is known than of the tokens themselves.

    Args:
        logprobs: As vLLM's sampler gives them.
        places: Which of them is a request's first, by id.
    """

    def __init__(self, logprobs: LogprobsLists, places: dict[str, int]) -> None:
        self._logprobs = logprobs
        self._places = places
        is_plain = logprobs.cu_num_generated_tokens is None and logprobs.logprobs.shape[1] == 1
        self.values = logprobs.logprobs[:, 0].tolist() if is_plain else None
        self.ranks = logprobs.sampled_token_ranks.tolist() if is_plain else None

    def of(self, output: EngineCoreOutput) -> LogprobsLists:
        """Those of one output, which vLLM would have cut out."""
        place = self._places[output.request_id]
        return self._logprobs.slice_request(place, len(output.new_token_ids))

    def single(self, output: EngineCoreOutput) -> tuple[float, int] | None:
        """Logprob and rank, if one token came and no more is known than of the token itself."""
        if self.values is None or self.ranks is None or len(output.new_token_ids) != 1:
            return None
        place = self._places[output.request_id]
        return self.values[place], self.ranks[place]


@dataclass(slots=True)
class Held:
    """What a running request has sampled and not sent.

    Args:
        waits: Whether its tokens may wait here at all.
        values, ranks: Of the last tokens, those of which no more is known.
        parts: Logprobs of the tokens before these.
        first: Its first output of these tokens.
    """

    waits: bool
    has_logprobs: bool
    tokens: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    parts: list[LogprobsLists] = field(default_factory=list)
    first: EngineCoreOutput | None = None

    def add(self, output: EngineCoreOutput, step: Step | None) -> None:
        """An output that vLLM made, and the logprobs of its step."""
        self.first = self.first or output
        if step is not None and self.has_logprobs and output.new_token_ids:
            single = step.single(output)
            if single is None:
                self._close()
                self.parts.append(step.of(output))
            else:
                self.values.append(single[0])
                self.ranks.append(single[1])
        self.tokens += output.new_token_ids

    def leave(self, whole: EngineCoreOutput) -> EngineCoreOutput:
        """``whole``, the last output, with tokens and logprobs of all."""
        self._close()
        if self.parts:
            whole.new_logprobs = self.parts[0] if len(self.parts) == 1 else _joined(self.parts)
        whole.new_token_ids = self.tokens
        if self.first is not None:
            whole.prefill_stats = self.first.prefill_stats
        self.tokens, self.parts, self.first = [], [], None
        return whole

    def _close(self) -> None:
        """Make a part of the last tokens' logprobs."""
        if self.values:
            self.parts.append(
                LogprobsLists(
                    np.array(self.tokens[-len(self.values) :], dtype=np.int32)[:, None],
                    np.array(self.values, dtype=np.float32)[:, None],
                    np.array(self.ranks, dtype=np.int32),
                )
            )
            self.values, self.ranks = [], []


def _joined(parts: list[LogprobsLists]) -> LogprobsLists:
    return LogprobsLists(
        np.concatenate([part.logprob_token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.sampled_token_ranks for part in parts]),
    )


class Lumps:
    """Holds tokens of running requests back, until there are enough or the request ends."""

    def __init__(self, num_tokens: int = NUM_TOKENS) -> None:
        self._num_tokens = num_tokens
        self._held: dict[str, Held] = {}

    def meet(self, name: str, params: SamplingParams | None) -> Held:
        """A request that is new, and what will be held of it."""
        has_logprobs = params is not None and params.num_logprobs is not None
        held = self._held[name] = Held(_is_read_at_its_end(params), has_logprobs)
        return held

    def leaving(self, outputs: list[EngineCoreOutput], step: Step | None) -> list[EngineCoreOutput]:
        """Of a step's outputs those that leave now, with what was held back before them.

        Args:
            step: Their logprobs, which they do not have yet; None: there are none.
        """
        found = []
        for output in outputs:
            held = self._held.get(output.request_id)
            if held is None:  # an error of vLLM's
                found.append(output)
                continue
            held.add(output, step)
            if output.finished:
                del self._held[output.request_id]
            elif held.waits and len(held.tokens) < self._num_tokens:
                continue
            found.append(held.leave(output))
        return found

    def forget_ended(self, requests: dict[str, Any]) -> None:
        """Drop what is held of requests that were aborted.

        Args:
            requests: vLLM's own that have not ended, by id.
        """
        if len(self._held) > len(requests):
            self._held = {name: held for name, held in self._held.items() if name in requests}


def _is_read_at_its_end(params: SamplingParams | None) -> bool:
    return (
        params is not None
        and params.output_kind is RequestOutputKind.FINAL_ONLY
        and not params.detokenize  # the engine's process looks for stop strings
        and params.prompt_logprobs is None
    )
