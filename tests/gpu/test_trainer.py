"""The torch trainer on a GPU: its loss and gradient are those of plain per-sequence passes."""

import pytest
import torch
from torch._dynamo.utils import counters

from tests.trainer.backends.test_torch_engine import gradients, plain_gradient, plain_outputs
from tests.trainer.toy import groups, model_folder, multi_turn, plain_model
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.settings import TorchEngineSettings
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective

PPO = Objective.from_names("ppo", None, "none", None, "default", {"entropy_coef": 0.01})
DTYPES = ("float32", "bfloat16")


def model(path, **changes):
    return model_folder(path / "model", hidden_size=64, intermediate_size=96, **changes)


async def prepared(folder, **changes):
    given = {
        "dtype": "bfloat16", "device": "cuda", "micro_batches": MicroBatchRule(max_tokens=400),
        "optimizer": OptimizerSettings(lr=1e-3), **changes,
    }  # fmt: skip
    engine = TorchTrainEngine(TorchEngineSettings(folder, **given))
    await engine.prepare()
    return engine


def distance(found, wanted):
    """Relative distance of two gradients as a whole."""
    names = sorted(wanted)
    a = torch.cat([found[name].float().cpu().flatten() for name in names])
    b = torch.cat([wanted[name].float().cpu().flatten() for name in names])
    return float((a - b).norm() / b.norm())


def rounding(folder, batch, wanted):
    """How far plain bfloat16 passes of transformers are from the float32 gradient."""
    model = plain_model(folder).to(torch.bfloat16)
    loss, _ = PPO(plain_outputs(model, batch), batch)
    loss.backward()
    return distance({n: p.grad for n, p in model.named_parameters()}, wanted)


ROWS = {
    "groups": lambda: groups(4, 4, prompt=120, response=60),
    "multi_turn": multi_turn,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("rows", list(ROWS))
async def test_loss_and_gradient_are_those_of_plain_passes(tmp_path, dtype, shares, rows):
    folder = model(tmp_path)
    batch = TrainBatch.from_experiences(ROWS[rows]())
    loss, wanted = plain_gradient(folder, batch, PPO)
    engine = await prepared(folder, dtype=dtype, shares_prefixes=shares)
    metrics = await engine.forward_backward(batch, PPO)
    is_whole = dtype == "float32"
    assert metrics["actor/final_loss"] == pytest.approx(loss, abs=1e-4 if is_whole else 3e-2)
    allowed = 1e-4 if is_whole else 1.3 * rounding(folder, batch, wanted)
    assert distance(gradients(engine), wanted) < allowed
    await engine.close()


@pytest.mark.parametrize("changes", [{"sliding_window": 16}, {"head_dim": 12}])
async def test_windows_and_odd_heads(tmp_path, changes):
    if "sliding_window" in changes:
        from transformers import MistralConfig

        folder = str(tmp_path / "model")
        MistralConfig(
            vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, **changes,
        ).save_pretrained(folder)  # fmt: skip
    else:
        folder = model(tmp_path, **changes)
    batch = TrainBatch.from_experiences(ROWS["groups"]())
    on_cpu = await prepared(folder, dtype="float32", device="cpu")
    on_gpu = await prepared(folder)
    wanted = await on_cpu.forward(batch)
    found = await on_gpu.forward(batch)
    gap = (wanted["logprob"] - found["logprob"]).abs()
    assert float(gap.mean()) < 0.05
    assert float(gap.max()) < 0.5


async def test_a_gradient_is_the_same_twice(tmp_path):
    folder = model(tmp_path)
    batch = TrainBatch.from_experiences(ROWS["groups"]())
    found = []
    for _ in range(2):
        engine = await prepared(folder)
        await engine.forward_backward(batch, PPO)
        found.append(gradients(engine))
    assert distance(*found) < 2e-2  # the kernels of the backward pass add up in any order


async def test_compiled_layers_give_the_same(tmp_path):
    folder = model(tmp_path)
    batch = TrainBatch.from_experiences(ROWS["groups"]())
    _, wanted = plain_gradient(folder, batch, PPO)
    for checkpointing in (False, True):
        engine = await prepared(folder, compiles_layers=True, gradient_checkpointing=checkpointing)
        await engine.forward_backward(batch, PPO)
        assert distance(gradients(engine), wanted) < 1.3 * rounding(folder, batch, wanted)


async def test_few_and_many_tokens_share_a_graph(tmp_path):
    folder = model_folder(
        tmp_path / "model", hidden_size=1536, num_attention_heads=12, num_hidden_layers=1
    )
    torch._dynamo.reset()
    counters.clear()
    engine = await prepared(
        folder, compiles_layers=True, micro_batches=MicroBatchRule(max_tokens=8192)
    )
    for num_rows in (60, 30, 61, 5, 1):  # of 120 tokens: PyTorch would fuse some sums differently
        rows = groups(num_rows, 1, prompt=120, response=60)
        await engine.forward_backward(TrainBatch.from_experiences(rows), PPO)
        await engine.optim_step()
    assert counters["stats"]["unique_graphs"] == 1
    await engine.close()


async def test_steps_follow_those_of_the_cpu(tmp_path):
    folder = model(tmp_path)
    batch = TrainBatch.from_experiences(ROWS["groups"]())
    engines = [await prepared(folder, dtype="float32", device=device) for device in ("cpu", "cuda")]
    for _ in range(3):
        found = []
        for engine in engines:
            await engine.forward_backward(batch, PPO)
            found.append(await engine.optim_step())
        assert found[0]["actor/grad_norm"] == pytest.approx(found[1]["actor/grad_norm"], rel=1e-3)


@pytest.mark.parametrize("offload", ["param_offload", "optimizer_offload"])
async def test_offloading_changes_nothing(tmp_path, offload):
    folder = model(tmp_path)
    batch = TrainBatch.from_experiences(ROWS["groups"]())
    norms = []
    for changes in ({}, {offload: True}):
        engine = await prepared(folder, **changes)
        for _ in range(2):
            await engine.forward_backward(batch, PPO)
            metrics = await engine.optim_step()
        norms.append(metrics["actor/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=6e-2)


async def test_logprobs_of_a_checkpoint_that_was_loaded(tmp_path):
    folder = model(tmp_path)
    batch = TrainBatch.from_experiences(ROWS["groups"]())
    engine = await prepared(folder)
    await engine.forward_backward(batch, PPO)
    await engine.optim_step()
    await engine.save(tmp_path / "saved")
    await engine.wait_saved()
    wanted = await engine.forward(batch)
    other = await prepared(folder)
    await other.load(tmp_path / "saved")
    found = await other.forward(batch)
    assert torch.equal(found["logprob"], wanted["logprob"])
