"""The trainer on the Tinker service, through the real client library: against our own trainer."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("tinker")

from tests.tinker_service import ALPHA, ATTENTION, KEY, MLP, TinkerTestService
from tests.trainer.backends.steps import assert_same, grpo, rows
from tests.trainer.backends.test_torch_engine import plain_outputs, settings
from tests.trainer.toy import model_folder, plain_model
from trinity.checkpoint.convert import convert
from trinity.common.models.adapters import AdapterSettings
from trinity.engine.tinker.saved import SavedModel
from trinity.engine.tinker.service import TinkerServiceError
from trinity.engine.tinker.settings import TinkerServiceSettings
from trinity.trainer.backends.tinker.engine import TinkerTrainEngine
from trinity.trainer.backends.tinker.settings import TinkerTrainSettings
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.schedule import Schedule
from trinity.trainer.loss import Objective

RANK = 4
NAME = "toy/model"
OPTIMIZER = OptimizerSettings(
    lr=2e-3, weight_decay=0.1, clip_grad=0.05, schedule=Schedule("constant", warmup_steps=2)
)
PPO = Objective.from_names("ppo")
WITH_KL = Objective.from_names("ppo", kl_loss_fn="k2", kl_loss_fn_args={"kl_coef": 0.1})


@pytest.fixture
def folder(tmp_path):
    return model_folder(tmp_path / "model")


@pytest.fixture
def service(folder, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with TinkerTestService({NAME: lambda: plain_model(folder)}).serving() as serving:
        yield serving


def engine_of(service, **changes) -> TinkerTrainEngine:
    address = TinkerServiceSettings(NAME, service.address, timeout_s=60)
    given = {"rank": RANK, "seed": 0, "train_unembed": False, "optimizer": OPTIMIZER}
    return TinkerTrainEngine(TinkerTrainSettings(address, **{**given, **changes}))


async def prepared(service, **changes) -> TinkerTrainEngine:
    engine = engine_of(service, **changes)
    await engine.prepare()
    return engine


async def our_own(folder) -> TorchTrainEngine:
    adapter = AdapterSettings(rank=RANK, alpha=ALPHA, target_modules=(*ATTENTION, *MLP), seed=0)
    engine = TorchTrainEngine(settings(folder, adapter=adapter, optimizer=OPTIMIZER))
    await engine.prepare()
    return engine


def weights_at(service) -> dict[str, torch.Tensor]:
    run = list(service.trained.values())[-1]
    return {
        name.replace(".default.", ".lora."): parameter.detach()
        for name, parameter in run.model.named_parameters()
        if ".lora_" in name
    }


async def test_logprobs_are_those_of_a_direct_forward_pass(service, folder):
    engine, batch = await prepared(service), rows(0)
    wanted = plain_outputs(plain_model(folder), batch)["logprob"].detach()
    for which in ("actor", "ref"):
        found = (await engine.forward(batch, which))["logprob"]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    await engine.close()


@pytest.mark.parametrize(
    "objective", [PPO, WITH_KL, Objective.from_names("gspo"), Objective.from_names("sft")]
)
async def test_steps_equal_those_of_our_own_trainer(service, folder, objective):
    found, wanted = [], []
    for engine, steps in ((await prepared(service), found), (await our_own(folder), wanted)):
        for seed in range(3):
            batch = rows(seed)
            if objective.needs_reference:
                reference = (await engine.forward(batch, "ref"))["logprob"]
                batch = batch.with_columns(ref_logprob=reference)
            metrics = await engine.forward_backward(batch, objective)
            steps.append(metrics | await engine.optim_step())
        await engine.close()
    assert_same(found, wanted)
    masters = engine._trained("actor").optimizer.weights.masters
    at_service = weights_at(service)
    assert set(masters) == set(at_service)
    for name, master in masters.items():
        torch.testing.assert_close(at_service[name], master.detach(), atol=1e-5, rtol=0)


async def test_rows_without_a_gradient_are_scored_but_not_trained_on(service):
    engine, batch = await prepared(service), rows(0)
    sent = []
    passes = service.passes
    service.passes = lambda request: sent.append(len(request.data)) or passes(request)
    await engine.forward_backward(batch, PPO)
    await engine.optim_step()
    live = int(batch["action_mask"].any(dim=1).sum())
    has_gradient = int((batch["advantages"] * batch["action_mask"]).any(dim=1).sum())
    assert sent[0] == live and 0 < sent[1] <= has_gradient < live
    await engine.close()


async def test_both_ways_to_load_differ_in_the_optimizer(service, tmp_path):
    """Field report 35: a load that ignores its optimizer flag."""
    engine = await prepared(service)
    await grpo(engine, range(2), PPO)
    path = tmp_path / "global_step_2"
    await engine.save(path, files={"trainer_meta.json": "{}"})
    goes_on = await grpo(engine, range(2, 4), PPO)  # while the save is under way
    await engine.wait_saved()
    assert (path / "trainer_meta.json").read_text() == "{}"
    assert SavedModel.read(path / "actor").num_steps == 2
    wanted = weights_at(service)
    await engine.close()
    resumed = await prepared(service)
    await resumed.load(path)
    assert await grpo(resumed, range(2, 4), PPO) == goes_on
    for name, value in weights_at(service).items():
        torch.testing.assert_close(value, wanted[name], atol=0, rtol=0)
    anew = await prepared(service)
    await anew.load(path, weights_only=True)
    [first, _] = await grpo(anew, range(2, 4), PPO)
    assert first["actor/final_loss"] == goes_on[0]["actor/final_loss"]
    assert first["actor/lr"] < goes_on[0]["actor/lr"]  # warms up again
    other = weights_at(service)
    assert any(not torch.allclose(other[name], wanted[name]) for name in wanted)
    without_moments = await prepared(service)
    await without_moments.load(path, weights_only=True)
    without_moments._num_steps = 2  # the same learning rates: nothing but Adam's state is missing
    rates = [step["actor/lr"] for step in await grpo(without_moments, range(2, 4), PPO)]
    assert rates == [step["actor/lr"] for step in goes_on]
    other = weights_at(service)
    assert any(not torch.allclose(other[name], wanted[name]) for name in wanted)
    for each in (resumed, anew, without_moments):
        await each.close()


async def test_an_adapter_that_is_fetched_merges_into_its_base(service, folder, tmp_path):
    plain_model(folder).save_pretrained(folder)
    engine = await prepared(service)
    await grpo(engine, range(2), PPO)
    path = tmp_path / "global_step_2"
    await engine.save(path, hf=True)
    await grpo(engine, range(2, 3), PPO)  # what is fetched is of the step before
    await engine.wait_saved()
    done = convert(path, base_model=Path(folder), merges=True)
    assert done.status == "converted", done.message
    merged = AutoModelForCausalLM.from_pretrained(path / "actor/huggingface", dtype=torch.float32)
    await engine.load(path)
    found = (await engine.forward(rows(3)))["logprob"]
    wanted = plain_outputs(merged, rows(3))["logprob"].detach()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    await engine.close()


async def test_files_are_fetched_into_their_folder_alone(service, tmp_path, monkeypatch):
    engine = await prepared(service)
    urls_of = service.urls_of

    def with_one_beyond(path):
        told = urls_of(path)
        told["urls"]["../../../beyond"] = told["urls"]["adapter_config.json"]
        return told

    monkeypatch.setattr(service, "urls_of", with_one_beyond)
    await engine.save(tmp_path / "jobs" / "global_step_1", hf=True)
    with pytest.raises(TinkerServiceError, match=r"names a file '\.\./\.\./\.\./beyond'"):
        await engine.wait_saved()
    assert not list(tmp_path.rglob("beyond"))
    await engine.close()


async def test_a_checkpoint_of_another_rank_or_trainer_is_refused(service, tmp_path):
    engine = await prepared(service)
    await engine.save(tmp_path / "global_step_1")
    await engine.wait_saved()
    other = await prepared(service, rank=8)
    with pytest.raises(ValueError, match="adapter of rank 4 on toy/model, and the file asks"):
        await other.load(tmp_path / "global_step_1")
    with pytest.raises(ValueError, match="not made by `trainer_type: tinker`"):
        await other.load(tmp_path)
    for each in (engine, other):
        await each.close()


async def test_what_is_no_function_of_logprobs_is_refused(service):
    engine, batch = await prepared(service), rows(0)
    with pytest.raises(ValueError, match="not entropies"):
        await engine.forward(batch, entropy=True)
    with pytest.raises(ValueError, match="not values"):
        await engine.forward(batch, "critic")
    heat = torch.full((len(batch),), 0.7)
    with pytest.raises(ValueError, match=r"temperature 0\.7"):
        await engine.forward(batch.with_columns(temperature=heat))
    await engine.close()


async def test_a_gradient_that_is_not_finite_changes_nothing(service):
    engine, batch = await prepared(service), rows(0)
    before = {name: value.clone() for name, value in weights_at(service).items()}
    broken = batch.with_columns(advantages=batch["advantages"] * float("inf"))
    await engine.forward_backward(broken, PPO)
    assert (await engine.optim_step())["actor/skipped_updates"] == 1
    for name, value in weights_at(service).items():
        torch.testing.assert_close(value, before[name], atol=0, rtol=0)
    await engine.forward_backward(batch, PPO)
    assert "actor/skipped_updates" not in await engine.optim_step()
    assert (await engine.health())["optimizer_steps"] == 2
    await engine.close()


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False, "train_mlp": False, "train_unembed": True}, {"lm_head"}),
    ],
)
async def test_the_layers_that_are_asked_for_get_an_adapter(service, flags, layers):
    engine = await prepared(service, **flags)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in weights_at(service)} == layers
    await engine.forward_backward(rows(0), PPO)
    await engine.close()
