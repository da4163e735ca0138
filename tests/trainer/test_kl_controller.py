"""An adaptive KL coefficient moves with each optimizer step, and comes back after a resume."""

import math

import pytest
import torch

from tests.trainer.backends.test_torch_engine import settings
from tests.trainer.test_trainer import FakeSource, trainer
from tests.trainer.toy import groups, model_folder
from trinity.algorithm import KL_FN
from trinity.common.config.algorithm import LOSS_AGG_MODES
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective
from trinity.trainer.update import Updater

ADAPTIVE = {"adaptive": True, "kl_coef": 0.1, "target_kl": 1e-6, "horizon": 100}


async def test_the_coefficient_of_the_loss_moves_by_the_kl_of_the_step(tmp_path):
    batch = TrainBatch.from_experiences(groups())
    batch = batch.with_columns(ref_logprob=batch["old_logprob"])
    engine = TorchTrainEngine(settings(model_folder(tmp_path / "model")))
    await engine.prepare()
    objective = Objective.from_names("ppo", None, "k2", ADAPTIVE)
    metrics: dict[str, float] = {}
    await Updater(engine, objective).update(batch, 1, metrics)
    assert metrics["actor/kl_loss"] > 1e-5
    assert metrics["actor/kl_coef"] == pytest.approx(0.1)
    assert objective.kl_loss_fn is not None
    assert objective.kl_loss_fn.kl_coef == pytest.approx(0.1 * (1 + 0.2 * len(batch) / 100))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
async def test_the_kl_that_moves_it_is_per_token_whatever_the_loss_is_a_mean_of(tmp_path, mode):
    batch = TrainBatch.from_experiences(groups())
    engine = TorchTrainEngine(settings(model_folder(tmp_path / "model")))
    await engine.prepare()
    logprob = (await engine.forward(batch))["logprob"]
    gap = torch.linspace(0.5, 1.5, logprob.shape[1])
    kl = float(gap.expand_as(logprob)[batch["action_mask"]].mean())
    batch = batch.with_columns(ref_logprob=logprob - gap)
    near = {**ADAPTIVE, "target_kl": kl / 1.1}
    objective = Objective.from_names("ppo", None, "abs", near, loss_agg_mode=mode)
    await Updater(engine, objective).update(batch, 1, {})
    assert objective.kl_loss_fn.kl_coef == pytest.approx(0.1 * (1 + 0.1 * len(batch) / 100))


class Measured:
    """A `TrainEngine` that finds the KL it is told."""

    def __init__(self, kl: float) -> None:
        self.kl = kl

    async def forward_backward(self, batch, objective, which="actor") -> dict[str, float]:
        return {"actor/kl_per_token": self.kl}

    async def optim_step(self, which="actor") -> dict[str, float]:
        return {}


async def coefficient_after(kl: float, batch: TrainBatch) -> float:
    objective = Objective.from_names("ppo", None, "k2", {**ADAPTIVE, "target_kl": 1.0})
    await Updater(Measured(kl), objective).update(batch, 1, {})
    return objective.kl_loss_fn.kl_coef


async def test_rows_without_a_trained_token_do_not_move_the_coefficient():
    experiences = groups()
    for experience in experiences[:5]:
        experience.action_mask[:] = False
    moved = await coefficient_after(1.1, TrainBatch.from_experiences(experiences))
    assert moved == pytest.approx(0.1 * (1 + 0.1 * (len(experiences) - 5) / 100))
    assert moved == await coefficient_after(1.1, TrainBatch.from_experiences(experiences[5:]))


async def test_a_kl_that_is_no_number_leaves_the_coefficient():
    assert await coefficient_after(math.nan, TrainBatch.from_experiences(groups())) == 0.1


def test_the_coefficient_stays_positive_where_a_step_has_more_rows_than_the_horizon():
    controlled = KL_FN.get("k2")(adaptive=True, kl_coef=0.1, target_kl=1.0, horizon=10)
    controlled.update_kl_coef(0.0, batch_size=64)
    assert controlled.kl_coef == pytest.approx(0.1 * 0.8)
    controlled.update_kl_coef(9.0, batch_size=64)
    assert controlled.kl_coef == pytest.approx(0.1 * 0.8 * (1 + 0.2 * 6.4))


def test_the_coefficients_are_part_of_the_trainers_state():
    subject, resumed = trainer(FakeSource(1)), trainer(FakeSource(1))
    for one in (subject, resumed):
        one.preparation.kl_penalty_fn = KL_FN.get("k1")(**ADAPTIVE)
        one.updater.objective.kl_loss_fn = KL_FN.get("k2")(**ADAPTIVE)
    subject.preparation.kl_penalty_fn.kl_coef = 0.5
    subject.updater.objective.kl_loss_fn.kl_coef = 0.25
    resumed.load_state_dict(subject.state_dict())
    assert resumed.preparation.kl_penalty_fn.kl_coef == 0.5
    assert resumed.updater.objective.kl_loss_fn.kl_coef == 0.25
