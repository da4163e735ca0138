"""The writer of a queue or database, in this process or another."""

from collections.abc import Sequence

from trinity.buffer.storage.queue import QueueStorage
from trinity.common.experience import Experience, serialize_many
from trinity.utils.metrics import Metrics


class QueueWriter:
    """Writes to a queue or database, in this process or another.

    Args:
        owns_storage: It opens the storage at the first `acquire` and closes it at the last
            `release`.
    """

    def __init__(self, storage: QueueStorage, *, owns_storage: bool = False) -> None:
        self.storage = storage
        self._owns_storage = owns_storage
        self._num_open = 0

    async def write(self, experiences: Sequence[Experience]) -> Metrics:
        if self.storage.is_local is True:  # a stand-in has no attributes
            return await self.storage.put(experiences)
        return await self.storage.put_batch(serialize_many(experiences))

    async def acquire(self) -> int:
        if self._owns_storage and self._num_open == 0:
            await self.storage.prepare()
        self._num_open += 1
        return await self.storage.acquire()

    async def release(self) -> int:
        left = await self.storage.release()
        self._num_open -= 1
        if self._owns_storage and self._num_open == 0:
            await self.storage.close()
        return left

    async def flush(self, until: int | None = None) -> None:
        await self.storage.flush(until)
