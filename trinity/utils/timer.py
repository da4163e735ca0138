"""Wall-clock time of a block, into a dict of metrics."""

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager


@contextmanager
def timed(metrics: MutableMapping[str, float], name: str) -> Iterator[None]:
    """Add the seconds the block takes to ``metrics[name]``, also if it raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        metrics[name] = metrics.get(name, 0.0) + time.perf_counter() - start
