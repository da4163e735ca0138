"""Compiled layers in ranks that FSDP2 cuts them over: the same numbers, compiled once for all."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from tests.trainer.backends import varlen_on_cpu
from tests.trainer.backends.process_ranks import rank_group
from tests.trainer.backends.steps import grpo, rows
from tests.trainer.backends.test_torch_engine import settings
from tests.trainer.toy import model_folder
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.rank import TorchTrainRank

pytestmark = pytest.mark.slow


class CompiledRank(TorchTrainRank):
    """Traces layers and their backward pass, and runs what was found by PyTorch's own kernels."""

    def _prepare(self, ranks=None):
        varlen_on_cpu.register()
        torch.compile = partial(torch.compile, backend="aot_eager")
        super()._prepare(ranks)

    async def compiled(self) -> tuple[int, int]:
        """Graphs, and frames that were given up."""
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    ("checkpointing", "gathers_once"),
    [(True, True), pytest.param(False, False, marks=pytest.mark.long)],
)
async def test_compiled_ranks_compute_what_one_process_does(tmp_path, checkpointing, gathers_once):
    given = settings(
        model_folder(tmp_path / "model", num_hidden_layers=3),
        micro_batches=MicroBatchRule(max_tokens=80),
        optimizer=OptimizerSettings(lr=1e-3, eps=1e-4),
    )
    single = TorchTrainEngine(given)
    await single.prepare()
    wanted = await grpo(single, range(4))
    given = settings(
        given.model_path,
        micro_batches=given.micro_batches,
        optimizer=given.optimizer,
        compiles_layers=True,
        gathers_once=gathers_once,
        gradient_checkpointing=checkpointing,
    )
    with rank_group(given, 2, CompiledRank) as group:
        await group.prepare()
        found = await grpo(group, range(2))
        [rank, _] = group.ranks
        num_graphs, num_breaks = await rank.compiled()
        assert (num_graphs, num_breaks) == (1, 0)  # not one a layer
        found += await grpo(group, range(2, 4))
        assert await rank.compiled() == (1, 0)
        logprob = (await group.forward(rows(7)))["logprob"]
        await group.close()
    for own, alone in zip(found, wanted, strict=True):
        for name in ("actor/final_loss", "actor/grad_norm"):
            assert own[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name
    wanted = (await single.forward(rows(7)))["logprob"]
    torch.testing.assert_close(logprob, wanted, atol=1e-4, rtol=1e-4)
