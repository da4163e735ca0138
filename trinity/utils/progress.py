"""How far something is that takes long, in a line of text, while it is under way."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Show = Callable[[str, bool], None]
"""Takes a line on what is under way, each second; True with those that a log or pipe is to have."""

_EVERY_S = 1.0
_FIRST_LINE_S = 10.0
_LINE_EVERY_S = 30.0
_ENOUGH = 10  # samples to tell their speed by


@dataclass
class Pace:
    """Turns counts into lines such as ``evaluating gsm8k: 230 of 1,319 samples   412 tokens/s``.

    Args:
        what: What is under way, as the line begins.
        total: Samples there will be; None: nothing is counted.
        clock: Seconds.
    """

    what: str
    total: int | None = None
    clock: Callable[[], float] = time.monotonic
    _first: tuple[float, int] | None = None
    _started: float = field(init=False)
    _next_line: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()
        self._next_line = self._started + _FIRST_LINE_S

    def line(self, done: int = 0, tokens: int = 0) -> str:
        """The state with ``done`` samples finished and ``tokens`` sampled since the start."""
        now = self.clock()
        seconds = now - self._started
        parts = [self.what]
        if self.total is not None:
            parts = [f"{self.what}: {done:,} of {self.total:,} samples"]
        if tokens > 0 and seconds > 0:
            parts.append(f"{tokens / seconds:,.0f} tokens/s")
        left = self._seconds_left(now, done)
        parts.append(f"{duration(seconds)} so far" if left is None else f"about {left} left")
        return "   ".join(parts)

    def is_line_due(self) -> bool:
        """Whether it is time for a line that stays: after 10 s, then every 30 s."""
        if self.clock() < self._next_line:
            return False
        self._next_line = self.clock() + _LINE_EVERY_S
        return True

    def _seconds_left(self, now: float, done: int) -> str | None:
        """What is left at the speed since the first samples came: they all began together."""
        if self._first is None and done:
            self._first = now, done
        if self._first is None or done - self._first[1] < _ENOUGH:
            return None
        since, first = self._first
        return duration(((self.total or 0) - done) * (now - since) / (done - first))


@asynccontextmanager
async def showing(
    pace: Pace, show: Show, logger: logging.Logger, line: Callable[[], str] | None = None
) -> AsyncIterator[None]:
    """Show ``line()``, or else that of ``pace``, each second of the block; log it now and then."""

    async def tell() -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            text, is_to_stay = (line or pace.line)(), pace.is_line_due()
            show(text, is_to_stay)
            if is_to_stay:
                logger.info("%s", text)

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()
        show("", False)


def duration(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3.5 h``: as exact as an estimate is."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
