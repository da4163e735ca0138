"""Programs that share a GPU and are measured in turns: all ready first, then one at a time.

They find each other through the folder in ``TRINITY_BENCH_TURNS``; how many they are says
``TRINITY_BENCH_PROGRAMS``. Without these nobody waits.
"""

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

FOLDER = "TRINITY_BENCH_TURNS"
COUNT = "TRINITY_BENCH_PROGRAMS"

_TIMEOUT_S = 400
_POLL_S = 0.2


def wait_for_all(name: str) -> None:
    """Return once as many programs as there are have come here; this one is ``name``."""
    given = os.environ.get(FOLDER)
    if given is None or COUNT not in os.environ:
        return
    folder, deadline = Path(given), time.monotonic() + _TIMEOUT_S
    (folder / f"{name}.ready").touch()
    while len(list(folder.glob("*.ready"))) < int(os.environ[COUNT]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"Of {os.environ[COUNT]} programs some never got ready.")
        time.sleep(_POLL_S)


@contextmanager
def turn() -> Iterator[None]:
    """Within, no other program has its turn; after it others come before this one again."""
    given = os.environ.get(FOLDER)
    if given is None:
        yield
        return
    with Path(given, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    time.sleep(_POLL_S)


@asynccontextmanager
async def my_turn(name: str) -> AsyncIterator[None]:
    """`wait_for_all` and then `turn`, while the event loop goes on."""
    await asyncio.to_thread(wait_for_all, name)
    with ExitStack() as stack:
        await asyncio.to_thread(stack.enter_context, turn())
        yield
