"""Experiences as JSON lines: for looking at them, and for reading them back later."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from trinity.buffer.schema.experience import to_row
from trinity.buffer.storage.journal import Appender
from trinity.common.experience import Experience
from trinity.utils.metrics import Metrics


class FileWriter:
    """Appends to a `.jsonl` file; a list is written whole or not at all."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._num_writers = 0
        self._appender: Appender | None = None

    async def acquire(self) -> int:
        if self._appender is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._appender = Appender(self.path)
        self._num_writers += 1
        return self._num_writers

    async def write(self, experiences: Sequence[Experience]) -> Metrics:
        if self._appender is None:
            raise RuntimeError("FileWriter.write before acquire.")
        rows = [to_row(experience) for experience in experiences]
        await asyncio.to_thread(self._appender.append, rows)
        return {}

    async def release(self) -> int:
        self._num_writers -= 1
        if self._num_writers == 0 and self._appender is not None:
            self._appender.close()
            self._appender = None
        return self._num_writers

    async def flush(self, until: int | None = None) -> None:
        """Nobody waits for a file."""
