"""Programs that share a GPU and are measured in turns: all ready first, then one at a time.

They find each other through the folder in ``TRINITY_BENCH_TURNS``; without it nobody waits.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = "TRINITY_BENCH_TURNS"
COUNT = "TRINITY_BENCH_PROGRAMS"

_TIMEOUT_S = 400
_POLL_S = 0.2


def wait_for_all(name: str) -> None:
    """Return once as many programs as there are have come here; this one is ``name``."""
    given = os.environ.get(FOLDER)
    if given is None:
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
