"""Ranks die by kill -9 while they write a checkpoint together."""

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.trainer.backends.process_ranks import rank_group
from tests.trainer.backends.test_torch_engine import GRPO, settings
from tests.trainer.toy import groups, model_folder
from trinity.checkpoint import atomic, layout
from trinity.trainer.backends.torch.rank import TorchTrainRank
from trinity.trainer.batch import TrainBatch

pytestmark = pytest.mark.slow
ROWS = TrainBatch.from_experiences(groups())


class DiesInSecondSave(TorchTrainRank):
    """Rank 1 gets as far as half of its weights, rank 0 writes all of its part."""

    async def write_part(self, path: str | Path) -> None:
        await super().write_part(path)
        if Path(path).name != "global_step_2":
            return
        if self._rank.rank == 1:
            part = atomic.aside_of(Path(path)) / "actor" / layout.shard_name("model", 2, 1)
            os.truncate(part, part.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)


class AllDieInSecondSave(DiesInSecondSave):
    """Nobody is left to clear up."""

    async def abandon_checkpoint(self, path: str | Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("kind", "torn"), [(DiesInSecondSave, []), (AllDieInSecondSave, [".global_step_2.saving"])]
)
async def test_the_checkpoint_before_is_whole_and_is_gone_on_from(tmp_path, kind, torn):
    given = settings(model_folder(tmp_path / "model"))
    job = tmp_path / "job"
    with rank_group(given, 2, kind) as group:
        await group.prepare()
        await group.forward_backward(ROWS, GRPO)
        await group.optim_step()
        await group.save(layout.step_folder(job, 1))
        await group.wait_saved()
        wanted = (await group.forward(ROWS))["logprob"]
        await group.save(layout.step_folder(job, 2))
        with pytest.raises((EOFError, OSError)):
            await group.wait_saved()
    found = layout.find_latest(job)
    assert found.folder == layout.step_folder(job, 1)
    assert list(found.torn) == torn
    with rank_group(given, 2) as group:
        await group.prepare()
        await group.load(found.folder)
        assert torch.equal((await group.forward(ROWS))["logprob"], wanted)
        assert layout.drop_torn(job) == torn
        await group.save(layout.step_folder(job, 2))
        await group.wait_saved()
        await group.close()
    assert layout.find_latest(job) == layout.Found(layout.step_folder(job, 2))
