"""The actor's objective by hand: what is added up, from which tensors, under which names."""

import math

import pytest
import torch

from tests.algorithm.batches import experience
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective

RATIO = torch.tensor([[2.0, 1.0], [1.0, 100.0]])
ENTROPY = torch.tensor([[0.3, 0.6], [0.9, 7.0]])
KL = {"kl_loss_fn": "k1", "kl_loss_fn_args": {"kl_coef": 0.1}}
BONUS = {"entropy_loss_fn": "default", "entropy_loss_fn_args": {"entropy_coef": 0.01}}


def batch(**changes: torch.Tensor) -> TrainBatch:
    """Two rows of two tokens, the last of which is masked and full of what must not count."""
    rows = [
        experience(1.0, run=run, mask=mask, logprobs=[-1.0, -1.0], advantages=advantages)
        for run, (mask, advantages) in enumerate([((1, 1), [1.0, 1.0]), ((1, 0), [-1.0, 99.0])])
    ]
    found = TrainBatch.from_experiences(rows)
    reference = found["old_logprob"] + RATIO.log() - 1
    return found.with_columns(**{"ref_logprob": reference, **changes})


def outputs() -> dict[str, torch.Tensor]:
    return {"logprob": batch()["old_logprob"] + RATIO.log(), "entropy": ENTROPY}


def test_policy_loss_less_bonus_plus_kl():
    objective = Objective.from_names("ppo", **KL, **BONUS)
    loss, metrics = objective(outputs(), batch())
    policy, bonus = (-1.2 - 1 + 1) / 3, 0.01 * (0.3 + 0.6 + 0.9) / 3
    assert float(loss) == pytest.approx(policy - bonus + 0.1)
    found = {name: float(value) for name, value in metrics.items()}
    assert found["actor/pg_loss"] == pytest.approx(policy)
    assert found["actor/entropy_loss"] == pytest.approx(0.6)
    assert found["actor/kl_loss"] == pytest.approx(1)
    assert found["actor/ppo_kl"] == pytest.approx(-math.log(2) / 3)
    assert found["actor/ratio_mean"] == pytest.approx(4 / 3)
    assert found["actor/ratio_max_deviation"] == pytest.approx(1)


def test_the_mode_of_the_loss_is_that_of_bonus_and_kl_too():
    by_row = Objective.from_names("ppo", **KL, **BONUS, loss_agg_mode="seq-mean-token-mean")
    loss, metrics = by_row(outputs(), batch())
    assert float(metrics["actor/entropy_loss"]) == pytest.approx((0.45 + 0.9) / 2)
    policy = ((-1.2 - 1) / 2 + 1) / 2
    assert float(loss) == pytest.approx(policy - 0.01 * 0.675 + 0.1)


def test_rows_of_expert_data_say_nothing_of_the_ratio():
    expert = batch(expert_mask=torch.tensor([True, False]))
    _, metrics = Objective.from_names("ppo")(outputs(), expert)
    assert float(metrics["actor/ratio_max_deviation"]) == 0
    alone = batch(expert_mask=torch.tensor([True, True]))
    _, metrics = Objective.from_names("sft")(outputs(), alone)
    assert "actor/ratio_mean" not in metrics


def test_rows_are_idle_where_only_the_policy_loss_acts_and_all_advantages_are_zero():
    rows = batch(advantages=torch.tensor([[0.0, 1.0], [0.0, 99.0]]))
    assert Objective.from_names("ppo").idle_rows(rows).tolist() == [False, True]
    for other in (
        Objective.from_names("ppo", **KL),
        Objective.from_names("ppo", **BONUS),
        Objective.from_names("sft"),
    ):
        assert other.idle_rows(rows).tolist() == [False, False]


def test_rows_without_advantage_are_not_idle_where_the_policy_loss_acts_on_them_otherwise():
    """Else they go through the model twice: without gradient, and when it is found with it."""
    rows = batch(advantages=torch.zeros(2, 2), expert_mask=torch.tensor([True, False]))
    assert Objective.from_names("mix").idle_rows(rows).tolist() == [False, True]
    pulled = Objective.from_names("rec", {"regularizer": "k2", "regularizer_coef": 0.1})
    assert pulled.idle_rows(rows).tolist() == [False, False]
    assert Objective.from_names("rec").idle_rows(rows).tolist() == [True, True]
