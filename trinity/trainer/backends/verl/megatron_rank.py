"""`MegatronTrainRank`: one process of veRL's Megatron engine."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from trinity.checkpoint import atomic, layout
from trinity.common.errors import TrinityError
from trinity.trainer.backends.torch.state import HuggingFaceFolder
from trinity.trainer.backends.verl.rank import VerlTrainRank
from trinity.trainer.engine import ModelRole

if TYPE_CHECKING:
    from trinity.trainer.backends.verl.megatron import MegatronModel


class MegatronTrainRank(VerlTrainRank):
    """Holds its part of every model.

    Megatron's ranks write a checkpoint together: training goes on when all have written, and only
    the Hugging Face folder is written beside it.
    """

    _folders: dict[str, HuggingFaceFolder]

    async def begin_checkpoint(self, path: str | Path) -> None:
        """`hold_states` has begun it."""

    async def hold_states(self, path: str | Path, hf: bool) -> None:
        """Write the checkpoint ``path`` with the other ranks, but its Hugging Face folders.

        Raises:
            TrinityError: This rank can't. Others may wait for it then, and have to be ended.
        """
        folder = Path(path)
        try:
            await self._run(lambda: self._save(folder, hf))
        except (Exception, CheckpointException) as error:
            atomic.abandon_folder(folder)
            rank, cause = _first_cause(error, self._rank.rank)
            raise TrinityError(
                f"Rank {rank} could not write its part of the checkpoint {folder.name}: {cause}. "
                "The other ranks wait for it, so this run ends. The checkpoint before is whole: "
                "once the cause is mended, start again."
            ) from error

    async def write_part(self, path: str | Path) -> None:
        """Write the Hugging Face folders, if they are this rank's to write."""
        folders, self._folders = self._folders, {}
        aside = atomic.aside_of(Path(path))
        await asyncio.to_thread(_write, folders, aside)

    def _new_model(self, which: ModelRole) -> "MegatronModel":
        from trinity.trainer.backends.verl.megatron import MegatronModel

        return MegatronModel(which, self._settings)

    def _save(self, path: Path, hf: bool) -> None:
        if self._rank.rank == 0:
            atomic.begin_folder(path)
        dist.barrier()
        self._folders = {}
        for role, model in self._megatron_models().items():
            model.save(atomic.aside_of(path) / role)
            folder = self._hf_folder(model, hf and role == "actor")
            if folder is not None:
                self._folders[role] = folder

    def _load(self, path: Path, weights_only: bool) -> None:
        for role, model in self._megatron_models().items():
            try:
                model.load(path / role, weights_only)
            except CheckpointException as error:
                rank, cause = _first_cause(error, self._rank.rank)
                raise TrinityError(f"Rank {rank} could not read {path / role}: {cause}.") from error

    def _megatron_models(self) -> "dict[str, MegatronModel]":
        """The trained ones."""
        return cast("dict[str, MegatronModel]", self._trained())


def _first_cause(error: BaseException, rank: int) -> tuple[int, BaseException]:
    """Which rank failed, and of what. Megatron's ranks tell each other, by no `Exception`."""
    if isinstance(error, CheckpointException):
        for number, (cause, _) in sorted(error.failures.items()):
            return number, cause
    return rank, error


def _write(folders: dict[str, HuggingFaceFolder], aside: Path) -> None:
    for role, folder in folders.items():
        folder.write(aside / role / layout.HUGGING_FACE)
