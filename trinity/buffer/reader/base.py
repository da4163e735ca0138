"""Readers: where experiences come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trinity.common.experience import Experience


@dataclass(frozen=True)
class ReaderSettings:
    """What a reader is told besides the section of its buffer.

    Args:
        storage: For `queue` and `sql`: what the writers write to (or a stand-in). None makes one.
        tokenizer_path: For data sets: whose tokenizer and chat template.
        batch_size: Experiences of a read that names no number.
        total_steps: For data sets: reads of a full batch there are; None: `total_epochs`.
        max_tokens: For data sets: a longer row is a bad row.
        trust_remote_code: For data sets: run tokenizer code that comes with the model folder.
    """

    storage: object | None = None
    tokenizer_path: str | None = None
    batch_size: int = 1
    total_steps: int | None = None
    max_tokens: int | None = None
    trust_remote_code: bool = False


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
