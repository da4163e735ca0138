"""Learning rates worked out by hand; optimizer steps against PyTorch's own AdamW."""

import logging
import math

import pytest
import torch

from tests.trainer.backends.test_torch_engine import plain_outputs, settings
from tests.trainer.toy import groups, model_folder, plain_model
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.schedule import Schedule
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective
from trinity.utils.log import get_logger


def factors(schedule: Schedule, count: int) -> list[float]:
    return [schedule.factor(step) for step in range(count)]


def test_warm_up_by_steps_then_constant():
    assert factors(Schedule(warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(Schedule(), 2) == [1, 1]


def test_warm_up_by_ratio_and_steps_win_over_it():
    by_ratio = Schedule(warmup_ratio=0.2, total_steps=10)
    assert factors(by_ratio, 3) == [0.5, 1, 1]
    assert factors(Schedule(warmup_steps=0, warmup_ratio=0.5, total_steps=10), 1) == [1]


def test_decay_to_the_least_rate():
    cosine = Schedule("cosine", warmup_steps=2, total_steps=6, min_ratio=0.1)
    wanted = [0.5, 1] + [0.1 + 0.9 * (1 + math.cos(math.pi * n / 4)) / 2 for n in range(5)]
    assert factors(cosine, 7) == pytest.approx(wanted)
    assert cosine.factor(50) == pytest.approx(0.1)


def test_a_schedule_that_needs_the_number_of_steps_says_so():
    for wrong in ({"kind": "cosine"}, {"warmup_ratio": 0.1}):
        with pytest.raises(ValueError, match=r"set trainer\.total_steps or"):
            Schedule(**wrong)
    with pytest.raises(ValueError, match="'cosin'; choose"):
        Schedule("cosin", total_steps=3)


@pytest.mark.parametrize("clip", [None, 0.05])
async def test_steps_are_those_of_plain_adamw(tmp_path, clip):
    folder = model_folder(tmp_path / "model")
    rates = {"betas": (0.8, 0.95), "weight_decay": 0.3}
    schedule = Schedule(warmup_steps=2)
    engine = TorchTrainEngine(
        settings(
            folder,
            optimizer=OptimizerSettings(lr=1e-3, clip_grad=clip, schedule=schedule, **rates),
        )
    )
    await engine.prepare()
    model, objective = plain_model(folder), Objective.from_names("ppo")
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, **rates)
    for step in range(3):
        batch = TrainBatch.from_experiences(groups(seed=step))
        await engine.forward_backward(batch, objective)
        metrics = await engine.optim_step()
        plain.zero_grad()
        objective(plain_outputs(model, batch), batch)[0].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        plain.param_groups[0]["lr"] = lr = 1e-3 * [0.5, 1, 1][step]
        plain.step()
        assert metrics["actor/lr"] == lr
        assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    weights = engine._trained("actor").optimizer.weights.masters
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter, atol=2e-6, rtol=1e-5)


@pytest.fixture
def told():
    """What the trainer's log says."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = get_logger("trainer")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_gradient_that_is_not_finite_is_told_by_name_and_changes_nothing(
    tmp_path, told, dtype
):
    engine = TorchTrainEngine(settings(model_folder(tmp_path / "model"), dtype=dtype))
    await engine.prepare()
    objective, batch = Objective.from_names("ppo"), TrainBatch.from_experiences(groups())
    weights = engine._trained("actor").optimizer.weights
    before = {name: weight.clone() for name, weight in weights.masters.items()}
    await engine.forward_backward(batch, objective)
    name = "model.layers.1.mlp.up_proj.weight"
    gradient = weights.split.gradients[name] if weights.split else weights.masters[name].grad
    gradient[3, 3] = math.inf
    metrics = await engine.optim_step()
    assert metrics["actor/skipped_updates"] == 1
    assert all(torch.equal(weights.masters[name], weight) for name, weight in before.items())
    [line] = [line for line in told if "Update" in line]
    assert line == f"Update 1 of the actor is left out: the gradient is not finite at {name}."
    await engine.forward_backward(batch, objective)
    assert "actor/skipped_updates" not in await engine.optim_step()


async def test_a_loss_that_is_not_finite_names_what_it_was_given(tmp_path, told):
    engine = TorchTrainEngine(settings(model_folder(tmp_path / "model")))
    await engine.prepare()
    experiences = groups()
    experiences[5].advantages = torch.full_like(experiences[5].advantages, math.nan)
    batch = TrainBatch.from_experiences(experiences)
    await engine.forward_backward(batch, Objective.from_names("ppo"))
    assert "The loss of the actor is nan: advantages is not finite in row 5." in told
