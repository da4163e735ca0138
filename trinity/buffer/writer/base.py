"""Writers: where experiences go in."""

from collections.abc import Sequence
from typing import Protocol

from trinity.buffer.storage.queue import QueueStorage
from trinity.common.experience import Experience, serialize_many
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


class QueueWriter:
    """Writes to a queue, in this process or another."""

    def __init__(self, storage: QueueStorage) -> None:
        self.storage = storage

    async def write(self, experiences: Sequence[Experience]) -> Metrics:
        if isinstance(self.storage, QueueStorage):
            return await self.storage.put(experiences)
        return await self.storage.put_batch(serialize_many(experiences))

    async def acquire(self) -> int:
        return await self.storage.acquire()

    async def release(self) -> int:
        return await self.storage.release()

    async def flush(self, until: int | None = None) -> None:
        await self.storage.flush(until)
