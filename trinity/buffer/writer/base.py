"""Writers: where experiences go in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trinity.common.experience import Experience
    from trinity.utils.metrics import Metrics


class BufferWriter(Protocol):
    """Somewhere to put experiences. `acquire` before the first write, `release` after the last."""

    async def write(self, experiences: Sequence[Experience]) -> Metrics:
        """Add a list of experiences, all or none of it; numbers about the buffer."""
        ...

    async def acquire(self) -> int:
        """Take part; returns how many writers there are."""
        ...

    async def release(self) -> int:
        """Have done; the last one to do so closes the buffer."""
        ...

    async def flush(self, until: int | None = None) -> None:
        """Say that nothing more comes before the weights of training step ``until`` are out."""
        ...
