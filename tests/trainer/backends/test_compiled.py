"""Compiled layers of one process: the same numbers, and one graph for packed rows of any kind."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx.experimental import _config as symbolic_shapes

from tests.trainer.backends import varlen_on_cpu
from tests.trainer.backends.steps import GRPO, rows
from tests.trainer.backends.test_torch_engine import settings
from tests.trainer.toy import groups, model_folder
from trinity.trainer.backends.torch import attention_plan, varlen
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.batch import TrainBatch

pytestmark = pytest.mark.slow


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Traces layers and their backward pass, and runs what was found by PyTorch's own kernels."""
    for place, name in ((varlen, "_DTYPES"), (attention_plan, "AttentionPlan")):
        monkeypatch.setattr(place, name, getattr(place, name))
    varlen_on_cpu.register()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    with symbolic_shapes.patch(use_duck_shape=symbolic_shapes.use_duck_shape):
        yield
    torch._dynamo.reset()


def batches() -> list[TrainBatch]:
    """Rows that share nothing, one row, as many segments as a head has sizes, and usual ones."""
    return [
        *(TrainBatch.from_experiences(groups(count, 1, seed=count)) for count in (5, 1, 7)),
        *(TrainBatch.from_experiences(groups(1, size, seed=size)) for size in (6, 2, 30)),
        *(rows(seed) for seed in range(3)),
    ]


async def outcomes(engine: TorchTrainEngine) -> list[dict[str, float]]:
    """Loss and gradient norm of a step on each of the batches."""
    return [
        await engine.forward_backward(batch, GRPO) | await engine.optim_step()
        for batch in batches()
    ]


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_layers_are_compiled_once(tmp_path, as_on_a_gpu, checkpointing):
    given = {"num_threads": 1, "gradient_checkpointing": checkpointing}
    folder = model_folder(tmp_path / "model", num_hidden_layers=3)
    plain = TorchTrainEngine(settings(folder, **given))
    await plain.prepare()
    wanted = await outcomes(plain)
    engine = TorchTrainEngine(settings(folder, compiles_layers=True, **given))
    await engine.prepare()
    found = await outcomes(engine)
    assert counters["stats"]["unique_graphs"] == 1
    for batch in batches():
        await engine.forward(batch)
    # Without gradient; when checkpointing, what enters the first layer wants one all the same.
    assert counters["stats"]["unique_graphs"] == 2 + checkpointing
    for own, other in zip(found, wanted, strict=True):
        for name in ("actor/final_loss", "actor/grad_norm"):
            assert own[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
    await engine.close()
    await plain.close()
