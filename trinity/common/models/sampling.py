"""From what a workflow asks for, and what the settings say, to `SamplingParams`."""

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trinity.common.models.protocol import SamplingParams
from trinity.common.models.settings import ModelSettings

_KNOWN = {field.name for field in fields(SamplingParams)} - {"request_id"}


def default_sampling(settings: ModelSettings) -> dict[str, Any]:
    """The sampling defaults of a model, by the names that `chat` takes."""
    return {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "repetition_penalty": settings.repetition_penalty,
        "max_tokens": settings.max_response_tokens,
        "min_tokens": settings.min_response_tokens,
        "ignore_eos": settings.ignore_eos,
    }


def sampling_params(
    settings: ModelSettings, prompt_length: int, wanted: Mapping[str, Any], seed: int
) -> SamplingParams:
    """Parameters of one request.

    Args:
        wanted: Fields of `SamplingParams`; None stands for the default. ``logprobs`` is taken
            and needs nothing: experiences have them always.
        seed: For requests that bring none.

    Raises:
        TypeError: A name is unknown.
        ValueError: A value is out of its bounds.
    """
    given = {name: value for name, value in wanted.items() if value is not None}
    given.pop("logprobs", None)
    unknown = given.keys() - _KNOWN
    if unknown:
        raise TypeError(
            f"Unknown sampling parameters {sorted(unknown)}; known are {sorted(_KNOWN)}."
        )
    chosen: dict[str, Any] = {"seed": seed, **default_sampling(settings), **given}
    if isinstance(chosen.get("stop"), str):
        chosen["stop"] = (chosen["stop"],)
    for name in ("stop", "stop_token_ids"):
        chosen[name] = tuple(chosen.get(name) or ())
    if settings.max_model_len is not None:
        room = max(settings.max_model_len - prompt_length, 1)
        wanted_tokens = chosen["max_tokens"]
        chosen["max_tokens"] = room if wanted_tokens is None else min(wanted_tokens, room)
    if chosen["max_tokens"] is not None:
        chosen["min_tokens"] = min(chosen["min_tokens"], chosen["max_tokens"])
    return SamplingParams(**chosen)


def request_seed(seed: int, call: int) -> int:
    """Seed of call number ``call`` of a run with ``seed``."""
    digest = hashlib.blake2b(f"{seed}/{call}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")
