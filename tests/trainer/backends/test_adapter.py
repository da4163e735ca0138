"""An adapter in the trainer: against a plain computation, in checkpoints, on engines and ranks."""

from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.trainer.backends.process_ranks import rank_group
from tests.trainer.backends.test_torch_engine import plain_outputs, settings
from tests.trainer.toy import groups, model_folder, plain_model
from trinity.checkpoint.convert import convert
from trinity.cli.launcher import app
from trinity.common.models.adapters import AdapterSettings
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective

GRPO = Objective.from_names("ppo")
ADAPTER = AdapterSettings(rank=4, alpha=8)


def engine_settings(folder: str, **changes: object):
    return settings(folder, adapter=ADAPTER, optimizer=OptimizerSettings(lr=1e-2), **changes)


def rows(seed: int = 0) -> TrainBatch:
    return TrainBatch.from_experiences(groups(3, 4, seed=seed))


async def trained(folder: str, steps: int = 2) -> TorchTrainEngine:
    engine = TorchTrainEngine(engine_settings(folder))
    await engine.prepare()
    for seed in range(steps):
        await engine.forward_backward(rows(seed), GRPO)
        await engine.optim_step()
    return engine


@torch.no_grad()
def plain_logprobs(model, batch: TrainBatch) -> torch.Tensor:
    return plain_outputs(model, batch)["logprob"]


async def test_a_fresh_adapter_changes_nothing_and_the_reference_stays_the_base(tmp_path):
    folder = model_folder(tmp_path / "model")
    engine = await trained(folder, steps=0)
    wanted = plain_logprobs(plain_model(folder), rows())
    first = (await engine.forward(rows(), "actor"))["logprob"]
    torch.testing.assert_close(first, wanted, atol=1e-5, rtol=1e-5)
    await engine.forward_backward(rows(), GRPO)
    await engine.optim_step()
    base = (await engine.forward(rows(), "ref"))["logprob"]
    torch.testing.assert_close(base, first, atol=0, rtol=0)
    assert not torch.allclose((await engine.forward(rows(), "actor"))["logprob"], first)
    await engine.forward_backward(rows(1), GRPO)
    assert (await engine.optim_step())["actor/grad_norm"] > 0


async def test_gradients_are_those_of_peft_itself(tmp_path):
    folder = model_folder(tmp_path / "model")
    engine = await trained(folder, steps=1)
    masters = engine._trained("actor").optimizer.weights.masters
    await engine.save(tmp_path / "global_step_1")
    await engine.wait_saved()
    plain = plain_model(folder)
    peft = PeftModel.from_pretrained(
        plain, str(tmp_path / "global_step_1/actor/lora_adapter"), is_trainable=True
    )
    batch = rows(5)
    await engine.forward_backward(batch, GRPO)
    found = {name: master.grad.clone() for name, master in masters.items()}
    loss, _ = GRPO(plain_outputs(peft, batch), batch)
    loss.backward()
    for name, parameter in peft.named_parameters():
        if parameter.requires_grad:
            own = name.removeprefix("base_model.model.").replace(".default.", ".lora.")
            torch.testing.assert_close(found[own], parameter.grad, atol=1e-6, rtol=1e-5)


async def test_checkpoints_hold_the_adapter_alone_and_merge_into_a_plain_model(tmp_path):
    folder = model_folder(tmp_path / "model")
    engine = await trained(folder)
    path = tmp_path / "global_step_2"
    await engine.save(path, hf=True)
    await engine.wait_saved()
    wanted = (await engine.forward(rows(3), "actor"))["logprob"]
    shard = torch.load(path / "actor/model_world_size_1_rank_0.pt", weights_only=True)
    assert shard and all(".lora_" in name for name in shard)
    merged = AutoModelForCausalLM.from_pretrained(path / "actor/huggingface", dtype=torch.float32)
    torch.testing.assert_close(plain_logprobs(merged, rows(3)), wanted, atol=1e-5, rtol=1e-5)
    again = TorchTrainEngine(engine_settings(folder))
    await again.prepare()
    await again.load(path)
    found = (await again.forward(rows(3), "actor"))["logprob"]
    torch.testing.assert_close(found, wanted, atol=0, rtol=0)
    steps = []
    for run in (engine, again):
        metrics = await run.forward_backward(rows(4), GRPO)
        steps.append(metrics | await run.optim_step())
    assert steps[0] == steps[1]
    masters = [run._trained("actor").optimizer.weights.masters for run in (engine, again)]
    assert all(torch.equal(master, masters[1][name]) for name, master in masters[0].items())


async def test_convert_merges_an_adapter_into_its_base(tmp_path):
    folder = model_folder(tmp_path / "model")
    plain_model(folder).save_pretrained(folder)
    engine = await trained(folder)
    path = tmp_path / "global_step_2"
    await engine.save(path)
    await engine.wait_saved()
    refused = convert(path)
    assert refused.status == "failed" and "--merge" in refused.message
    refused = convert(path, merges=True)
    assert refused.status == "failed" and "--base-model-dir" in refused.message
    done = CliRunner().invoke(app, ["convert", "-c", str(path), "-b", folder, "--merge"])
    assert done.exit_code == 0, done.output
    merged = AutoModelForCausalLM.from_pretrained(path / "actor/huggingface", dtype=torch.float32)
    wanted = (await engine.forward(rows(3), "actor"))["logprob"]
    torch.testing.assert_close(plain_logprobs(merged, rows(3)), wanted, atol=1e-5, rtol=1e-5)


async def test_an_adapter_goes_on_from_its_files(tmp_path):
    folder = model_folder(tmp_path / "model")
    engine = await trained(folder)
    await engine.save(tmp_path / "global_step_2")
    await engine.wait_saved()
    files = tmp_path / "global_step_2/actor/lora_adapter"
    names = load_file(files / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.") for name in names)
    other = TorchTrainEngine(
        replace(engine_settings(folder), adapter=AdapterSettings(path=str(files)))
    )
    await other.prepare()
    found = (await other.forward(rows(3), "actor"))["logprob"]
    wanted = (await engine.forward(rows(3), "actor"))["logprob"]
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


async def test_a_target_that_no_module_has_is_refused(tmp_path):
    folder = model_folder(tmp_path / "model")
    for target in ("q_porj", "lm_head"):
        engine = TorchTrainEngine(
            replace(engine_settings(folder), adapter=AdapterSettings(target_modules=(target,)))
        )
        with pytest.raises(ValueError, match=r"q_porj|output layer"):
            await engine.prepare()


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "shares_rows"), [(2, 1), (4, 2)])
async def test_ranks_train_an_adapter_as_one_process_does(tmp_path, world_size, shares_rows):
    folder = model_folder(tmp_path / "model")
    single = await trained(folder)
    path = tmp_path / "global_step_2"
    given = engine_settings(folder, sequence_parallel=shares_rows, gathers_once=shares_rows == 1)
    with rank_group(given, world_size) as group:
        await group.prepare()
        for seed in range(2):
            await group.forward_backward(rows(seed), GRPO)
            await group.optim_step()
        for which in ("actor", "ref"):
            found = (await group.forward(rows(3), which))["logprob"]
            wanted = (await single.forward(rows(3), which))["logprob"]
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        await group.save(path, True)
        await group.wait_saved()
        await group.close()
    again = TorchTrainEngine(engine_settings(folder))
    await again.prepare()
    await again.load(path)
    for name, master in again._trained("actor").optimizer.weights.masters.items():
        own = single._trained("actor").optimizer.weights.masters[name]
        torch.testing.assert_close(master, own, atol=1e-6, rtol=1e-6)
    merged = AutoModelForCausalLM.from_pretrained(path / "actor/huggingface", dtype=torch.float32)
    wanted = (await again.forward(rows(3), "actor"))["logprob"]
    torch.testing.assert_close(plain_logprobs(merged, rows(3)), wanted, atol=1e-5, rtol=1e-5)
