"""`CheckpointParts`: how one of several ranks writes its part of a checkpoint."""

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trinity.checkpoint import atomic
from trinity.trainer.backends.torch.state import CheckpointWriter, Files, ModelState, write_files


class CheckpointParts:
    """A rank's steps of a save, in the order in which `RankGroup` asks for them."""

    _writer: CheckpointWriter
    _held: dict[str, ModelState]

    @abstractmethod
    def _states(self, hf: bool) -> dict[str, ModelState]: ...

    @abstractmethod
    async def _run(self, call: Callable[[], Any]) -> Any: ...

    async def begin_checkpoint(self, path: str | Path) -> None:
        """Make the folder that all ranks write into; on one rank."""
        atomic.begin_folder(Path(path))

    async def hold_states(self, path: str | Path, hf: bool) -> None:
        """Copy this rank's part of the checkpoint ``path``; `write_part` writes it."""
        self._held = await self._run(lambda: self._states(hf))

    async def write_part(self, path: str | Path) -> None:
        """Write what was copied, and wait for its end."""
        states, self._held = self._held, {}
        self._writer.begin_part(atomic.aside_of(Path(path)), states)
        await self._writer.wait()

    async def finish_checkpoint(self, path: str | Path, files: Files) -> None:
        """Put the folder in place, once all ranks have written; on one rank."""
        write_files(atomic.aside_of(Path(path)), files)
        atomic.finish_folder(Path(path))

    async def abandon_checkpoint(self, path: str | Path) -> None:
        """Remove what was written of a checkpoint that failed; on one rank."""
        atomic.abandon_folder(Path(path))
