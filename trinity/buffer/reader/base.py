"""Readers: where experiences come out."""

from typing import Any, Protocol

from trinity.common.experience import Experience


class BufferReader(Protocol):
    """Somewhere to take experiences from."""

    async def read(self, batch_size: int | None = None, **options: Any) -> list[Experience]:
        """The next experiences; `StopAsyncIteration` when there are none left."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """How far it has read."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        ...
