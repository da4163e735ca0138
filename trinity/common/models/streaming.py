"""The tokens of a request while it runs, and what may be shown of a reply that is not done."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast
from uuid import uuid4

from trinity.common.models.protocol import (
    Completion,
    InferenceEngine,
    SamplingParams,
    VisionEngine,
)

if TYPE_CHECKING:
    from torch import Tensor

Listener = Callable[[int, list[int]], None]
"""Gets the number of a sample and its new tokens so far."""

_POLL_S = 0.02
_MARKS = "<[{"  # how the calls of all forms begin


async def sampled(
    engine: InferenceEngine,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    listener: Listener | None,
    images: "Tensor | None" = None,
    adapter: str | None = None,
) -> list[Completion]:
    """``engine.sample``, with ``listener`` told of its tokens as they come."""
    if listener is None:
        return await _sample(engine, prompt_ids, params, images, adapter)
    name = uuid4().hex
    asked = replace(params, request_id=name)
    request = asyncio.ensure_future(_sample(engine, prompt_ids, asked, images, adapter))
    try:
        while not request.done():
            await asyncio.wait({request}, timeout=_POLL_S)
            if not request.done():
                for index, tokens in enumerate(await engine.partial(name)):
                    listener(index, tokens)
        return await request
    finally:
        request.cancel()
        with contextlib.suppress(BaseException):
            await request


async def _sample(
    engine: InferenceEngine,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    images: "Tensor | None",
    adapter: str | None,
) -> list[Completion]:
    if images is None:
        return await engine.sample(prompt_ids, params, adapter)
    if adapter is not None:
        raise ValueError(f"The adapter {adapter!r} reads texts only: leave the images out.")
    return await cast(VisionEngine, engine).sample_with_images(prompt_ids, images, params)


def sure_text(text: str, stops: Sequence[str], *, may_call: bool, may_reason: bool) -> str:
    """The part of an unfinished reply's text that will be in its content, come what may.

    Left out are the beginning of a character or of a stop text, what may turn out to be a call of
    a tool or the blank before one, and all that is or may be reasoning.
    """
    if may_reason:
        _, mark, text = text.partition("</think>")
        text = text.lstrip("\n") if mark else ""
    text = text.rstrip("\ufffd")
    cut = len(text)
    for stop in stops:
        cut = min(cut, _before(text, stop))
    if may_call:
        found = [place for mark in _MARKS if (place := text.find(mark)) >= 0]
        cut = min([cut, *found])
        is_blank_first = text[:1].isspace()
        return "" if is_blank_first else text[:cut].rstrip()
    return text[:cut]


def _before(text: str, stop: str) -> int:
    """Where ``stop``, or a beginning of it at the end of ``text``, starts."""
    place = text.find(stop)
    if place >= 0:
        return place
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return len(text) - length
    return len(text)
