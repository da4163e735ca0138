"""The reader of a queue, in this process or another."""

from typing import Any

from trinity.buffer.storage.queue import QueueStorage
from trinity.common.experience import Experience, deserialize_many


class QueueReader:
    """Reads batches of a queue. Its state is how far it has read.

    Args:
        storage: A `QueueStorage` or a stand-in for one.
        batch_size: Experiences of a read that names no number.
        timeout_s: Seconds to wait for a full batch; then the incomplete one is returned.
        owns_storage: It opens the storage at its first read.
    """

    def __init__(
        self,
        storage: QueueStorage,
        batch_size: int = 1,
        timeout_s: float = 1800.0,
        *,
        owns_storage: bool = False,
    ) -> None:
        self.storage = storage
        self._is_prepared = not owns_storage
        self.batch_size = batch_size
        self.timeout_s = timeout_s
        self._state: dict[str, Any] = {}
        self._resume_from: dict[str, Any] | None = None

    async def read(
        self,
        batch_size: int | None = None,
        *,
        min_model_version: int = 0,
        step: int | None = None,
    ) -> list[Experience]:
        """The next experiences.

        Args:
            min_model_version: Drop experiences of older weights.
            step: Training step they are for; see `QueueStorage.flush`.

        Raises:
            StopAsyncIteration: The queue is closed and empty.
            DeadlineError: Nothing came in time.
        """
        if not self._is_prepared:
            await self.storage.prepare()
            self._is_prepared = True
        if self._resume_from is not None:
            await self.storage.rewind(self._resume_from)
            self._resume_from = None
        size = batch_size or self.batch_size
        if self.storage.is_local is True:  # a stand-in has no attributes
            found = await self.storage.get(
                size, self.timeout_s, min_model_version=min_model_version, step=step
            )
            self._state = self.storage.read_position()
        else:
            payload, self._state = await self.storage.get_batch(
                size, self.timeout_s, min_model_version, step
            )
            found = None if payload is None else deserialize_many(payload)
        if found is None:
            raise StopAsyncIteration
        return found

    def state_dict(self) -> dict[str, Any]:
        return self._resume_from or self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the reads of ``state``: later ones come back at the next read."""
        self._resume_from = dict(state) if state else None
