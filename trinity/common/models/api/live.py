"""A stream of events while the engine works: chunks come as the tokens do."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from trinity.common.models.api import responses

T = TypeVar("T")


class LiveTokens:
    """The tokens so far of the samples of one request: between who samples and who shows them."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}
        self._changed: set[int] = set()
        self._has_news = asyncio.Event()

    def __call__(self, index: int, tokens: list[int]) -> None:
        if len(tokens) > len(self._tokens.get(index, ())):
            self._tokens[index] = tokens
            self._changed.add(index)
            self._has_news.set()

    def shifted(self, by: int) -> Callable[[int, list[int]], None]:
        """A listener whose sample 0 is sample ``by`` here."""
        return lambda index, tokens: self(by + index, tokens)

    async def news(self, task: "asyncio.Future[Any]") -> None:
        """Until there are new tokens, or ``task`` is done."""
        waiting = asyncio.ensure_future(self._has_news.wait())
        try:
            await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    def take(self) -> list[tuple[int, list[int]]]:
        """The samples that have grown since the last call."""
        found = [(index, self._tokens[index]) for index in sorted(self._changed)]
        self._changed.clear()
        self._has_news.clear()
        return found


@dataclass
class StreamForm:
    """How the events of one kind of answer look.

    Args:
        head: What all begin with.
        more: From head, choice and text to an event.
        rest: From the whole answer, and what of it is out, to the last events.
        begins_empty: Whether a choice begins with an event of its own.
    """

    head: responses.Json
    more: Callable[..., str]
    rest: Callable[..., Iterator[str]]
    begins_empty: bool
    with_usage: bool = False


async def events(
    live: LiveTokens,
    task: "asyncio.Future[T]",
    answer: Callable[[T], responses.Json],
    text_of: Callable[[list[int]], str],
    form: StreamForm,
) -> AsyncIterator[str]:
    """The events of a stream. A client that goes away ends the request."""
    sent: dict[int, str] = {}
    try:
        while not task.done():
            for index, tokens in live.take():
                if form.begins_empty and index not in sent:
                    sent[index] = ""
                    yield form.more(form.head, index)
                text, known = text_of(tokens), sent.get(index, "")
                if len(text) > len(known) and text.startswith(known):
                    sent[index] = text
                    yield form.more(form.head, index, text[len(known) :])
            await live.news(task)
        whole = answer(await task) | {"id": form.head["id"], "created": form.head["created"]}
    except Exception as error:  # the stream has begun: its client is told in it
        yield responses.error_event(f"{type(error).__name__}: {error}")
        return
    finally:
        task.cancel()
    for event in form.rest(whole, with_usage=form.with_usage, sent=sent):
        yield event
