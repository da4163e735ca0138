"""Ranks of Megatron: who works on the same rows, who tells what came out, a save that fails."""

import errno
import time
from pathlib import Path
from traceback import StackSummary

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.trainer.backends.process_ranks import rank_group
from trinity.checkpoint import atomic
from trinity.common.errors import TrinityError
from trinity.trainer.backends.torch.sharding import Ranks
from trinity.trainer.backends.verl.megatron_rank import MegatronTrainRank
from trinity.trainer.backends.verl.settings import MegatronSizes, VerlEngineSettings

LAYOUTS = {
    "copies": (MegatronSizes(), 2, [0, 1], [0, 1]),
    "matrices": (MegatronSizes(tensor=2), 4, [0, 0, 1, 1], [0, 2]),
    "stages": (MegatronSizes(pipeline=2), 4, [0, 1, 0, 1], [2, 3]),
    "all": (MegatronSizes(tensor=2, pipeline=2), 8, [0, 0, 1, 1, 0, 0, 1, 1], [4, 6]),
    "sequence": (MegatronSizes(context=2), 2, [0, 0], [0]),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_parts_of_the_rows_go_to_whole_copies_of_the_model(layout):
    sizes, world_size, parts, telling = LAYOUTS[layout]
    settings = VerlEngineSettings("model", strategy="megatron", megatron=sizes)
    ranks = range(world_size)
    assert [settings.part_of(rank, world_size) for rank in ranks] == parts
    assert [rank for rank in ranks if settings.tells(rank, world_size)] == telling
    assert settings.ranks_per_row * len(telling) == world_size
    assert settings.sequence_shares == sizes.context


def test_fsdp_shares_rows_along_the_sequence():
    settings = VerlEngineSettings("model", sequence_parallel=2)
    assert [settings.part_of(rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    assert [rank for rank in range(4) if settings.tells(rank, 4)] == [0, 2]


class HasNoRoom:
    """A model whose second rank finds the disk full while the first waits for it."""

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(dist.get_rank())).write_text("begun")
        dist.barrier()
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        dist.barrier()

    def load(self, folder: Path, weights_only: bool) -> None:
        raise CheckpointException("load", {1: (KeyError("rng_state"), StackSummary())})


class TellsOfIt(HasNoRoom):
    """As Megatron does it where it can: all ranks fail, with what failed on one of them."""

    def save(self, folder: Path) -> None:
        cause = OSError(errno.ENOSPC, "No space left on device", str(folder))
        raise CheckpointException("write", {1: (cause, StackSummary())})


class SavesTogether(MegatronTrainRank):
    model: type = HasNoRoom

    async def address(self) -> str:
        return self._meeting.address()

    def _join(self, address: str) -> None:
        self._ranks = Ranks(self._rank, self._settings, self._meeting.store(address))

    def _megatron_models(self):
        return {"actor": self.model()}


class SavesAndTells(SavesTogether):
    model = TellsOfIt


@pytest.mark.parametrize("kind", [SavesTogether, SavesAndTells])
async def test_a_rank_that_can_not_write_ends_the_save_at_once(tmp_path, kind):
    settings = VerlEngineSettings("model", strategy="megatron", device="cpu")
    with rank_group(settings, 2, kind) as group:
        await group.prepare()
        began = time.monotonic()
        with pytest.raises(TrinityError, match=r"Rank 1 .*global_step_3: .*No space left") as found:
            await group.save(tmp_path / "global_step_3")
        assert time.monotonic() - began < 250, "the ranks would wait 500 s for each other"
        assert "Rank 0" not in str(found.value)
        assert not atomic.aside_of(tmp_path / "global_step_3").exists()
        with pytest.raises(TrinityError, match=r"Rank 1 could not read .*actor: 'rng_state'"):
            await group.load(tmp_path / "global_step_2")
