import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.e2e.toy import Toy
from tests.trainer.backends.faq import loaded_by_the_script
from tests.trainer.backends.test_torch_engine import GRPO, plain_outputs, settings
from tests.trainer.toy import groups, model_folder, plain_model
from trinity.checkpoint import layout
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.schedule import Schedule
from trinity.trainer.batch import TrainBatch


async def trained(engine: TorchTrainEngine, steps: range) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        batch = TrainBatch.from_experiences(groups(seed=step))
        found = await engine.forward_backward(batch, GRPO)
        metrics.append(found | await engine.optim_step())
    return metrics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_run_resumed_at_any_step_equals_the_unbroken_one_bitwise(tmp_path, dtype):
    folder = model_folder(tmp_path / "model")
    optimizer = OptimizerSettings(lr=1e-3, schedule=Schedule(warmup_steps=4))
    whole = TorchTrainEngine(settings(folder, dtype=dtype, optimizer=optimizer))
    await whole.prepare()
    wanted = []
    for step in range(4):
        await whole.save(tmp_path / f"job/global_step_{step}")  # goes on while the next step runs
        wanted += await trained(whole, range(step, step + 1))
    await whole.wait_saved()
    end = state_of(whole)
    for step in range(4):
        resumed = TorchTrainEngine(settings(folder, dtype=dtype, seed=7, optimizer=optimizer))
        await resumed.prepare()
        await resumed.load(tmp_path / f"job/global_step_{step}")
        assert await trained(resumed, range(step, 4)) == wanted[step:]
        for (name, own), (_, other) in zip(state_of(resumed).items(), end.items(), strict=True):
            assert torch.equal(own, other), (step, name)


async def test_what_is_drawn_at_random_goes_on_too(tmp_path):
    engine = TorchTrainEngine(settings(model_folder(tmp_path / "model")))
    await engine.prepare()
    torch.rand(5)
    await engine.save(tmp_path / "global_step_1")
    await engine.wait_saved()
    wanted = torch.rand(5)
    resumed = TorchTrainEngine(settings(engine._settings.model_path, seed=7))
    await resumed.prepare()
    await resumed.load(tmp_path / "global_step_1")
    assert torch.equal(torch.rand(5), wanted)
    await resumed.load(tmp_path / "global_step_1", weights_only=True)
    assert not torch.equal(torch.rand(5), wanted)


def state_of(engine: TorchTrainEngine) -> dict[str, torch.Tensor]:
    """Masters and their moments."""
    optimizer = engine._trained("actor").optimizer
    found = {name: master.detach().clone() for name, master in optimizer.weights.masters.items()}
    for index, entry in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{key}": value.clone() for key, value in entry.items()}
    return found


@pytest.mark.parametrize("tied", [True, False])
async def test_the_huggingface_folder_is_a_whole_model_with_the_trainers_logprobs(tmp_path, tied):
    folder = Toy(tmp_path).write().model
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "tie_word_embeddings": tied}))
    GenerationConfig(temperature=0.7, do_sample=True).save_pretrained(folder)
    engine = TorchTrainEngine(settings(str(folder)))
    await engine.prepare()
    await trained(engine, range(1))
    await engine.save(tmp_path / "global_step_1", hf=True, files={"note.txt": "hello"})
    await engine.wait_saved()
    actor = tmp_path / "global_step_1" / "actor"
    assert "attn" not in (actor / "huggingface" / "config.json").read_text()
    assert (tmp_path / "global_step_1" / "note.txt").read_text() == "hello"
    assert json.loads((actor / "fsdp_config.json").read_text())["world_size"] == 1
    assert layout.find_latest(tmp_path).folder == tmp_path / "global_step_1"
    model = AutoModelForCausalLM.from_pretrained(actor / "huggingface")
    batch = TrainBatch.from_experiences(groups())
    with torch.no_grad():
        wanted = plain_outputs(model, batch)
    found = await engine.forward(batch, entropy=True)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    messages = [{"role": "user", "content": "sort 321"}]
    prompts = [
        AutoTokenizer.from_pretrained(path).apply_chat_template(messages, tokenize=False)
        for path in (folder, actor / "huggingface")
    ]
    assert prompts[0] == prompts[1] != ""
    assert GenerationConfig.from_pretrained(actor / "huggingface").temperature == 0.7


@pytest.mark.parametrize("own", ["chat_template.jinja", "tokenizer_config.json"])
async def test_a_chat_template_of_the_run_takes_the_place_of_the_models(tmp_path, own):
    folder = Toy(tmp_path).write().model
    if own == "tokenizer_config.json":
        template = (folder / "chat_template.jinja").read_text()
        (folder / "chat_template.jinja").unlink()
        settings_of_tokenizer = json.loads((folder / own).read_text())
        (folder / own).write_text(json.dumps(settings_of_tokenizer | {"chat_template": template}))
    engine = TorchTrainEngine(settings(str(folder), chat_template="{{ messages[0].content }}!"))
    await engine.prepare()
    await engine.save(tmp_path / "global_step_1")
    await engine.wait_saved()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "global_step_1/actor/huggingface")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a!"


async def test_the_script_of_the_faq_loads_a_checkpoint(tmp_path):
    folder = model_folder(tmp_path / "model")
    plain_model(folder).save_pretrained(folder)
    (tmp_path / "model/generation_config.json").unlink()
    engine = TorchTrainEngine(settings(folder))
    await engine.prepare()
    await trained(engine, range(1))
    await engine.save(tmp_path / "project/name/global_step_780")
    await engine.wait_saved()
    assert (
        tmp_path / "project/name/global_step_780/actor/huggingface/generation_config.json"
    ).exists()
    batch = TrainBatch.from_experiences(groups())
    with torch.no_grad():
        wanted = plain_outputs(loaded_by_the_script(folder, tmp_path), batch)["logprob"]
    found = (await engine.forward(batch))["logprob"]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


async def test_a_checkpoint_of_another_architecture_is_refused(tmp_path):
    engine = TorchTrainEngine(settings(model_folder(tmp_path / "a")))
    await engine.prepare()
    await engine.save(tmp_path / "global_step_1")
    await engine.wait_saved()
    other = TorchTrainEngine(settings(model_folder(tmp_path / "b", hidden_size=64)))
    await other.prepare()
    with pytest.raises(ValueError, match="another architecture: model"):
        await other.load(tmp_path / "global_step_1")
    fewer = TorchTrainEngine(settings(model_folder(tmp_path / "c", num_hidden_layers=1)))
    await fewer.prepare()
    with pytest.raises(ValueError, match=r"its model.layers.1\.\S+ is not in the model"):
        await fewer.load(tmp_path / "global_step_1")


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
