import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.backends.test_torch_engine import GRPO, settings
from tests.trainer.toy import groups, model_folder
from trinity.checkpoint import layout
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.batch import TrainBatch


async def trained(engine: TorchTrainEngine, steps: range) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        batch = TrainBatch.from_experiences(groups(seed=step))
        found = await engine.forward_backward(batch, GRPO)
        metrics.append(found | await engine.optim_step())
    return metrics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_resumed_run_equals_the_unbroken_one_bitwise(tmp_path, dtype):
    folder = model_folder(tmp_path / "model")
    whole = TorchTrainEngine(settings(folder, dtype=dtype))
    await whole.prepare()
    await trained(whole, range(2))
    await whole.save(tmp_path / "job" / "global_step_2")
    wanted = await trained(whole, range(2, 5))
    await whole.wait_saved()
    resumed = TorchTrainEngine(settings(folder, dtype=dtype, seed=7))
    await resumed.prepare()
    await resumed.load(tmp_path / "job" / "global_step_2")
    assert await trained(resumed, range(2, 5)) == wanted
    for (name, a), (_, b) in zip(
        whole._trained("actor").optimizer.weights.masters.items(),
        resumed._trained("actor").optimizer.weights.masters.items(),
        strict=True,
    ):
        assert torch.equal(a, b), name


async def test_the_huggingface_folder_gives_the_trainers_logprobs(tmp_path):
    folder = model_folder(tmp_path / "model")
    engine = TorchTrainEngine(settings(folder))
    await engine.prepare()
    await trained(engine, range(1))
    await engine.save(tmp_path / "global_step_1", hf=True, files={"note.txt": "hello"})
    await engine.wait_saved()
    actor = tmp_path / "global_step_1" / "actor"
    model = AutoModelForCausalLM.from_pretrained(actor / "huggingface")
    assert "attn" not in (actor / "huggingface" / "config.json").read_text()
    tokens = torch.arange(3, 40)[None]
    batch = TrainBatch.from_experiences(groups())
    found = await engine.forward(batch)
    row, start = batch.row_tokens()[0].long(), int(batch["prompt_length"][0])
    logits = model(row[None]).logits[0, start - 1 : -1].log_softmax(-1)
    wanted = logits.gather(1, row[start:, None]).squeeze(1)
    torch.testing.assert_close(found["logprob"][0, : len(wanted)], wanted, atol=1e-5, rtol=1e-5)
    assert tokens.shape == (1, 37)
    assert (tmp_path / "global_step_1" / "note.txt").read_text() == "hello"
    assert json.loads((actor / "fsdp_config.json").read_text())["world_size"] == 1
    assert layout.find_latest(tmp_path).folder == tmp_path / "global_step_1"


async def test_a_checkpoint_of_another_architecture_is_refused(tmp_path):
    engine = TorchTrainEngine(settings(model_folder(tmp_path / "a")))
    await engine.prepare()
    await engine.save(tmp_path / "global_step_1")
    await engine.wait_saved()
    other = TorchTrainEngine(settings(model_folder(tmp_path / "b", hidden_size=64)))
    await other.prepare()
    with pytest.raises(ValueError, match="another architecture: model"):
        await other.load(tmp_path / "global_step_1")


async def test_weights_only_leaves_the_optimizer_new(tmp_path):
    folder = model_folder(tmp_path / "model")
    engine = TorchTrainEngine(settings(folder))
    await engine.prepare()
    await trained(engine, range(2))
    await engine.save(tmp_path / "global_step_2")
    await engine.wait_saved()
    other = TorchTrainEngine(settings(folder))
    await other.prepare()
    await other.load(tmp_path / "global_step_2", weights_only=True)
    assert other._trained("actor").optimizer.num_steps == 0
    assert not other._trained("actor").optimizer._adam.state
    for name, master in engine._trained("actor").optimizer.weights.masters.items():
        assert torch.equal(master, other._trained("actor").optimizer.weights.masters[name])


async def test_a_failed_save_is_raised_and_leaves_the_old_checkpoint(tmp_path):
    engine = TorchTrainEngine(settings(model_folder(tmp_path / "model")))
    await engine.prepare()
    await engine.save(tmp_path / "global_step_1")
    await engine.wait_saved()
    await engine.save(tmp_path / "global_step_1", files={"no/such/folder": ""})
    with pytest.raises(FileNotFoundError):
        await engine.wait_saved()
    assert layout.find_latest(tmp_path).folder == tmp_path / "global_step_1"
    assert layout.drop_torn(tmp_path) == []
