"""What queue and database have in common: the methods by which other processes use them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from trinity.common.experience import Experience, deserialize_many, serialize_many
from trinity.utils.metrics import Metrics

Write = Callable[[], bytes]


class Storage(ABC):
    """A place where experiences wait. The methods with `_batch` carry bytes."""

    is_local: ClassVar[bool] = True

    @abstractmethod
    async def put(self, experiences: Sequence[Experience]) -> Metrics:
        """Add a list of experiences, all of it or nothing; numbers about the storage."""

    @abstractmethod
    async def get(
        self,
        batch_size: int,
        timeout_s: float,
        *,
        min_model_version: int = 0,
        step: int | None = None,
    ) -> list[Experience] | None:
        """The next ``batch_size`` experiences; None at the end."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position of all who write and read."""

    def snapshot(self) -> tuple[dict[str, Any], list[Write] | None]:
        """`state_dict`, without its ``unread`` where it has that: each entry as a call to make it.

        The calls may take long, and may be made in any thread: they write what waits now.
        """
        return self.state_dict(), None

    @abstractmethod
    def read_position(self) -> dict[str, Any]:
        """The part of the position that belongs to who reads."""

    @abstractmethod
    async def stop_reading(self) -> None:
        """Nobody reads any more: a `put` that waits for room ends."""

    async def put_batch(self, payload: bytes) -> Metrics:
        """`put`, with the bytes of `serialize_many`."""
        return await self.put(deserialize_many(payload))

    async def get_batch(
        self,
        batch_size: int,
        timeout_s: float,
        min_model_version: int = 0,
        step: int | None = None,
    ) -> tuple[bytes | None, dict[str, Any]]:
        """`get`, with the experiences as bytes of `serialize_many`, and the reader's position."""
        found = await self.get(
            batch_size, timeout_s, min_model_version=min_model_version, step=step
        )
        return None if found is None else serialize_many(found), self.read_position()

    async def position(self) -> dict[str, Any]:
        """`state_dict`, for callers in other processes."""
        return self.state_dict()
