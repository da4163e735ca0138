"""Wait for the end of a process that was told to end."""

import asyncio
from collections.abc import Awaitable, Callable

from trinity.utils.actor import ProcessDied


async def end_of(call: Callable[[], Awaitable[object]], timeout_s: float = 60) -> ProcessDied:
    """What ``call`` says once its process is gone; before that, the process may still answer."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                await call()
            except ProcessDied as error:
                return error
            await asyncio.sleep(0.05)
