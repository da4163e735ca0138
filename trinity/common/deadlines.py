"""Waits that end: past the deadline an error names who was waited for, and during what."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from trinity.common.errors import DeadlineError

T = TypeVar("T")


async def within(
    seconds: float, wait: Awaitable[T], waited_for: str, phase: str, hint: str = ""
) -> T:
    """What ``wait`` gives, if it does so within ``seconds``.

    Raises:
        DeadlineError: It did not; names ``waited_for`` and ``phase``.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await wait
    except TimeoutError as error:
        if limit.expired():
            raise DeadlineError(waited_for, phase, seconds, hint) from error
        raise
