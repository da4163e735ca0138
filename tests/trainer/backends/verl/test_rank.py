"""What a rank of veRL keeps of whole weights; veRL need not be installed."""

from types import SimpleNamespace

import pytest
import torch

from trinity.trainer.backends.torch.sharding import RankSettings
from trinity.trainer.backends.verl.rank import VerlTrainRank
from trinity.trainer.backends.verl.settings import VerlEngineSettings


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_rank_that_writes_them_keeps_whole_weights(rank):
    put_together = []

    def export():
        for name in ("a", "b"):
            put_together.append(name)
            yield name, torch.ones(2)

    model = SimpleNamespace(export=export, plain=None, source="model")
    subject = VerlTrainRank(VerlEngineSettings("model"), None, RankSettings(rank, 2))
    folder = subject._hf_folder(model, has_weights=True)
    assert put_together == ["a", "b"]  # all ranks do that together
    if rank == 0:
        assert set(folder.weights) == {"a", "b"}
    else:
        assert folder is None
