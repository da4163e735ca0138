"""How a training step is cut into optimizer steps."""

import pytest
import torch

from tests.trainer.toy import groups
from trinity.algorithm.aggregate import LossScope
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective
from trinity.trainer.update import Updater


class Steps:
    """A `TrainEngine` that notes the rows of its optimizer steps, by number."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    async def forward_backward(
        self, batch: TrainBatch, objective: Objective, which: str, scope: LossScope | None = None
    ) -> dict[str, float]:
        self.rows.append([int(number) for number in batch["number"]])
        size = float(len(batch))
        return {"actor/pg_loss": size, "actor/ratio_max_deviation": size, "actor/gap_min": size}

    async def optim_step(self, which: str) -> dict[str, float]:
        return {}


def batch(**columns: object) -> TrainBatch:
    whole = TrainBatch.from_experiences(groups(2, 4))
    return whole.with_columns(number=torch.arange(len(whole)), **columns)


async def steps(rows: TrainBatch, step: int = 1, **settings: object) -> list[list[int]]:
    engine = Steps()
    await Updater(engine, Objective.from_names("ppo"), **settings).update(rows, step, {})
    return engine.rows


async def test_a_step_is_one_mini_batch_by_default():
    assert await steps(batch(), epochs=2) == [list(range(8))] * 2


async def test_each_epoch_goes_through_all_mini_batches():
    assert await steps(batch(), mini_batch_size=4, epochs=2) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    assert await steps(batch(), mini_batch_size=3) == [[0, 1, 2], [3, 4, 5], [6, 7]]


async def test_shuffled_rows_are_the_same_for_a_seed_and_others_in_each_epoch():
    found = await steps(batch(), mini_batch_size=4, epochs=2, shuffle=True, seed=1)
    assert await steps(batch(), mini_batch_size=4, epochs=2, shuffle=True, seed=1) == found
    first, second = found[0] + found[1], found[2] + found[3]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert await steps(batch(), 2, mini_batch_size=4, epochs=2, shuffle=True, seed=1) != found


async def test_metrics_are_means_over_the_optimizer_steps():
    metrics: dict[str, float] = {}
    updater = Updater(Steps(), Objective.from_names("ppo"), mini_batch_size=3)
    await updater.update(batch(), 1, metrics)
    assert metrics["actor/pg_loss"] == pytest.approx((3 + 3 + 2) / 3)
    assert metrics["actor/ratio_max_deviation"] == 3 and metrics["actor/gap_min"] == 2


async def test_the_actor_waits_for_the_critic_to_warm_up():
    for step, expected in ((1, ["critic"]), (2, ["critic"]), (3, ["critic", "actor"])):
        engine, learned = Steps(), []
        engine.optim_step = lambda which, learned=learned: _noted(which, learned)
        objective = Objective.from_names("ppo")
        await Updater(engine, objective, objective, critic_warmup=2).update(batch(), step, {})
        assert learned == expected


async def _noted(which: str, learned: list[str]) -> dict[str, float]:
    learned.append(which)
    return {}


async def test_a_preference_pair_is_one_experience_of_a_mini_batch():
    pairs = batch(pair_id=torch.arange(8) // 2, is_chosen=torch.arange(8) % 2 == 0)
    assert await steps(pairs, mini_batch_size=2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    [whole] = await steps(pairs, mini_batch_size=4)
    assert whole == list(range(8))
