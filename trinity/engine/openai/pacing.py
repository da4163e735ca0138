"""How fast requests may go out, and how long to wait before another try."""

import asyncio
import random
import time
from collections.abc import Mapping

_LONGEST_WAIT_S = 60.0


class Pacer:
    """At most so many requests at a time, and so many a minute, evenly spread.

    Args:
        max_per_minute: None: no limit.
    """

    def __init__(self, max_concurrent: int, max_per_minute: float | None) -> None:
        self._places = asyncio.Semaphore(max_concurrent)
        self._gap_s = 60.0 / max_per_minute if max_per_minute else 0.0
        self._next_start = 0.0

    async def __aenter__(self) -> None:
        await self._places.acquire()
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + self._gap_s
        try:
            await asyncio.sleep(start - now)
        except BaseException:
            self._places.release()
            raise

    async def __aexit__(self, *exception: object) -> None:
        self._places.release()


def wait_before_retry(attempt: int, first_wait_s: float, headers: Mapping[str, str]) -> float:
    """Seconds until the next try: what the service asks for, or twice as long each time.

    Args:
        attempt: 0 for the first try that failed.
    """
    asked = headers.get("retry-after", "")
    if asked.replace(".", "", 1).isdigit():
        return min(float(asked), _LONGEST_WAIT_S)
    longest = min(first_wait_s * 2**attempt, _LONGEST_WAIT_S)
    return longest * random.uniform(0.5, 1.0)
