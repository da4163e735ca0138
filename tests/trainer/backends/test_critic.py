import pytest
import torch
from transformers import AutoModelForTokenClassification, LlamaConfig

from tests.trainer.backends.process_ranks import rank_group
from tests.trainer.backends.test_torch_engine import assert_close, settings
from tests.trainer.toy import groups, model_folder
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.settings import CriticSettings
from trinity.trainer.batch import TrainBatch
from trinity.trainer.value_loss import ValueObjective


def with_critic(folder: str, **changes: object):
    critic = CriticSettings(
        folder,
        optimizer=OptimizerSettings(lr=1e-2),
        micro_batches=MicroBatchRule(max_tokens=90),
    )
    return settings(folder, critic=critic, **changes)


def plain_critic(folder: str):
    config = LlamaConfig.from_pretrained(folder)
    config.num_labels, config.classifier_dropout = 1, 0.0
    with torch.random.fork_rng():
        torch.manual_seed(42)
        return AutoModelForTokenClassification.from_config(config)


def plain_values(model: torch.nn.Module, batch: TrainBatch):
    values = []
    for b, tokens in enumerate(batch.row_tokens()):
        start = int(batch["prompt_length"][b])
        found = model(tokens.long()[None]).logits[0, start - 1 : -1, 0]
        pad = batch["action_mask"].shape[1] - len(found)
        values.append(torch.nn.functional.pad(found, (0, pad)) * batch["action_mask"][b])
    return torch.stack(values)


async def completed(engine: TorchTrainEngine, seed: int = 0) -> TrainBatch:
    batch = TrainBatch.from_experiences(groups(seed=seed))
    values = (await engine.forward(batch, which="critic"))["values"]
    returns = torch.rand(values.shape, generator=torch.Generator().manual_seed(seed))
    return batch.with_columns(old_values=values, values=values, returns=returns)


async def test_values_and_gradient_equal_plain_ones(tmp_path):
    folder = model_folder(tmp_path / "model")
    engine = TorchTrainEngine(with_critic(folder))
    await engine.prepare()
    batch = await completed(engine)
    model = plain_critic(folder)
    wanted = plain_values(model, batch)
    torch.testing.assert_close(batch["values"], wanted, atol=2e-6, rtol=1e-5)
    loss, _ = ValueObjective(0.5)({"values": wanted}, batch)
    loss.backward()
    metrics = await engine.forward_backward(batch, ValueObjective(0.5), which="critic")
    assert metrics["critic/vf_loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    masters = engine._trained("critic").optimizer.weights.masters
    found = {name: master.grad for name, master in masters.items()}
    assert_close(found, {name: p.grad for name, p in model.named_parameters()})


async def test_the_value_loss_is_clipped_by_hand():
    batch = TrainBatch.from_experiences(groups(1, 1, response=1))
    batch = batch.with_columns(old_values=torch.zeros(1, 1), returns=torch.full((1, 1), 0.1))
    near, _ = ValueObjective(0.5)({"values": torch.tensor([[0.4]])}, batch)
    assert float(near) == pytest.approx(0.5 * 0.3**2)
    far, metrics = ValueObjective(0.5)({"values": torch.tensor([[-2.0]])}, batch)
    assert float(far) == pytest.approx(0.5 * 2.1**2)
    assert float(metrics["critic/vf_clipfrac"]) == 0
    wrong_side = batch.with_columns(returns=torch.full((1, 1), 2.0))
    clipped, metrics = ValueObjective(0.5)({"values": torch.tensor([[1.0]])}, wrong_side)
    assert float(clipped) == pytest.approx(0.5 * 1.5**2)
    assert float(metrics["critic/vf_clipfrac"]) == 1


async def test_the_critic_learns_and_comes_back(tmp_path):
    folder = model_folder(tmp_path / "model")
    engine = TorchTrainEngine(with_critic(folder))
    await engine.prepare()
    batch = await completed(engine)
    losses = []
    for _ in range(4):
        metrics = await engine.forward_backward(batch, ValueObjective(10.0), which="critic")
        losses.append(metrics["critic/vf_loss"])
        metrics = await engine.optim_step("critic")
        assert metrics["critic/lr"] == 1e-2
    assert losses[-1] < losses[0]
    await engine.save(tmp_path / "global_step_1")
    await engine.wait_saved()
    assert (tmp_path / "global_step_1/critic/huggingface/config.json").is_file()
    other = TorchTrainEngine(with_critic(folder))
    await other.prepare()
    await other.load(tmp_path / "global_step_1")
    assert torch.equal(
        (await other.forward(batch, "critic"))["values"],
        (await engine.forward(batch, "critic"))["values"],
    )
    steps = []
    for run in (engine, other):
        metrics = await run.forward_backward(batch, ValueObjective(10.0), which="critic")
        steps.append(metrics | await run.optim_step("critic"))
    assert steps[0] == steps[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "shares_rows", "gathers_once"),
    [(2, 1, True), (2, 2, True), (4, 2, False)],
)
async def test_ranks_train_the_critic_as_one_process_does(
    tmp_path, world_size, shares_rows, gathers_once
):
    folder = model_folder(tmp_path / "model")
    single = TorchTrainEngine(with_critic(folder))
    await single.prepare()
    given = with_critic(folder, sequence_parallel=shares_rows, gathers_once=gathers_once)
    with rank_group(given, world_size) as group:
        await group.prepare()
        for seed in range(2):
            batch = await completed(single, seed)
            found = (await group.forward(batch, "critic"))["values"]
            torch.testing.assert_close(found, batch["values"], atol=1e-5, rtol=1e-5)
            norms = []
            for engine in (single, group):
                await engine.forward_backward(batch, ValueObjective(0.5), "critic")
                norms.append((await engine.optim_step("critic"))["critic/grad_norm"])
            assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        await group.close()


async def test_an_engine_without_a_critic_says_so(tmp_path):
    engine = TorchTrainEngine(settings(model_folder(tmp_path / "model")))
    await engine.prepare()
    with pytest.raises(ValueError, match="no critic"):
        await engine.forward(TrainBatch.from_experiences(groups(1)), "critic")
