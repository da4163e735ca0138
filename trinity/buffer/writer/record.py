"""What went into a buffer, as lines that a person can read, written in the background."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from trinity.buffer.storage.journal import Appender, StorageError
from trinity.buffer.writer.file import FileWriter
from trinity.common.experience import Experience
from trinity.utils.metrics import Metrics


class RecordWriter(FileWriter):
    """Appends texts, rewards and ids to a `.jsonl` file; tokens and logprobs are not in it.

    A line is written while the run goes on, and the run goes on if it can't be: nothing is ever
    read back from here.

    Args:
        path: The file; what is in it stays.
        logger: Told what can't be written.
    """

    def __init__(self, path: str, logger: logging.Logger | None = None) -> None:
        super().__init__(path)
        self._logger = logger or logging.getLogger(__name__)
        self._writing: asyncio.Task[None] | None = None

    async def write(self, experiences: Sequence[Experience]) -> Metrics:
        """Begin to append; returns as soon as the lines of the call before are on disk."""
        if self._appender is None:
            raise RuntimeError("RecordWriter.write before acquire.")
        await self._written()
        rows = [_readable(experience) for experience in experiences]
        self._writing = asyncio.create_task(self._append(self._appender, rows))
        return {}

    async def _append(self, appender: Appender, rows: Sequence[Mapping[str, object]]) -> None:
        try:
            await asyncio.to_thread(appender.append, rows)
        except (StorageError, OSError) as error:
            self._logger.warning("%d experiences are not recorded: %s", len(rows), error)

    async def _written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def release(self) -> int:
        await self._written()
        return await super().release()


def _readable(experience: Experience) -> dict[str, object]:
    """A line, with copies of the dictionaries that others may write into meanwhile."""
    row = experience.to_dict()
    return {**row, "info": dict(experience.info), "metrics": dict(experience.metrics)}
