"""From a request of ours to vLLM's parameters, and from its outputs to tokens and logprobs."""

from typing import cast

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams as VLLMParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from trinity.common.models.protocol import FinishReason, SamplingParams
from trinity.common.models.routes import filled
from trinity.engine.vllm.settings import VLLMEngineSettings


def parts(params: SamplingParams, settings: VLLMEngineSettings) -> list[range]:
    """Indices of the samples that make one request of vLLM's each.

    All are one, if none has a seed of its own and nobody follows their tokens. Of greedy ones
    vLLM takes one at a time.
    """
    is_greedy = params.temperature == 0
    if _seed(params, 0, settings) is None and not is_tagged(params, settings) and not is_greedy:
        return [range(params.n)]
    return [range(index, index + 1) for index in range(params.n)]


def is_tagged(params: SamplingParams, settings: VLLMEngineSettings) -> bool:
    """Whether tokens are looked at as they come."""
    return settings.update_mode == "keep" or params.request_id is not None


def vllm_params(
    params: SamplingParams, indices: range, room: int, settings: VLLMEngineSettings
) -> VLLMParams:
    """Those of the samples with ``indices``, of at most ``room`` tokens."""
    tagged = is_tagged(params, settings)
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
        seed=_seed(params, indices[0], settings),
        repetition_penalty=params.repetition_penalty,
        ignore_eos=params.ignore_eos,
        logprobs=0,
        flat_logprobs=not tagged,  # no dictionary for each token; has no empty parts
        detokenize=bool(params.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        output_kind=RequestOutputKind.DELTA if tagged else RequestOutputKind.FINAL_ONLY,
    )


def is_cut(params: SamplingParams) -> bool:
    """Whether vLLM's logprobs are those of a part of the distribution, or of another one."""
    is_part = params.top_p < 1 or params.top_k > 0 or params.min_p > 0 or params.min_tokens > 0
    return is_part or params.repetition_penalty != 1


def logprobs_of(part: CompletionOutput) -> list[float]:
    """Logprob of each token of an output; vLLM puts the token that was sampled first."""
    entries = part.logprobs
    if isinstance(entries, FlatLogprobs):
        return [entries.logprobs[start] for start in entries.start_indices]
    return [
        entry[token].logprob for entry, token in zip(entries or [], part.token_ids, strict=True)
    ]


def routes_of(part: CompletionOutput, num_tokens: int) -> Tensor | None:
    """[prompt + new tokens, layers, k] experts of an ended sample, where vLLM tells them.

    The last token was sampled and never computed. Layers without experts have zeros.
    """
    found = getattr(part, "routed_experts", None)
    if found is None:
        return None
    return filled(torch.from_numpy(found.astype(np.int16)), num_tokens)


def finish_reason(part: CompletionOutput) -> FinishReason:
    """Why a sample ended, or "abort" as long as it has not."""
    if part.finish_reason in ("stop", "length"):
        return cast(FinishReason, part.finish_reason)
    return "abort"


def _seed(params: SamplingParams, index: int, settings: VLLMEngineSettings) -> int | None:
    if params.seed is None or not settings.keeps_seeds:
        return None
    return (params.seed * 1_000_003 + index) % 2**63
