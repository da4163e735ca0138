"""Waits that end: past a deadline, with an error that says who was waited for; or all together."""

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


async def together(*waits: Awaitable[object]) -> None:
    """Wait for all of ``waits``; the first that fails ends the others, and its error is raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
