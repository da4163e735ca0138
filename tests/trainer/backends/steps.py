"""Optimizer steps of both trainers on equal rows, and what is compared of them."""

import torch

from tests.trainer.toy import groups, multi_turn
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective
from trinity.trainer.value_loss import ValueObjective

GRPO = Objective.from_names(
    "ppo", entropy_loss_fn="default", entropy_loss_fn_args={"entropy_coef": 0.01}
)
VALUES = ValueObjective(0.5)


def rows(seed: int) -> TrainBatch:
    """Groups of rows, some with gaps, some without advantage, one masked throughout."""
    experiences = [*groups(5, 3, seed=seed), *multi_turn(seed=seed)]
    for experience in experiences[3:6]:
        experience.advantages = torch.zeros(experience.response_length)
    for number, experience in enumerate(experiences[15:]):
        experience.eid.task, experience.eid.run = 99, number
    experiences[1].action_mask[:] = False
    return TrainBatch.from_experiences(experiences)


async def grpo(engine, seeds: range, objective: Objective = GRPO) -> list[dict[str, float]]:
    found = []
    for seed in seeds:
        metrics = await engine.forward_backward(rows(seed), objective)
        found.append(metrics | await engine.optim_step())
    return found


async def ppo(engine, seeds: range) -> list[dict[str, float]]:
    """Actor and critic; what the critic says becomes advantages and returns."""
    found = []
    for seed in seeds:
        batch = rows(seed)
        values = (await engine.forward(batch, "critic"))["values"]
        mask = batch["action_mask"]
        returns = torch.rand(values.shape, generator=torch.Generator().manual_seed(seed))
        batch = batch.with_columns(
            old_values=values, returns=returns, advantages=(returns - values) * mask
        )
        metrics = await engine.forward_backward(batch, VALUES, "critic")
        metrics |= await engine.optim_step("critic")
        metrics |= await engine.forward_backward(batch, GRPO)
        found.append(metrics | await engine.optim_step())
    return found


def assert_same(found, wanted, tolerance: float = 1e-5) -> None:
    """All metrics of all steps, relative to their size.

    The largest ratio of all tokens grows by a logprob's rounding; it may differ by thrice as much.
    """
    assert len(found) == len(wanted)
    for step, (own, other) in enumerate(zip(found, wanted, strict=True)):
        assert set(own) == set(other)
        for name, value in other.items():
            allowed = tolerance * max(1.0, abs(value)) * (3 if "max" in name else 1)
            assert abs(own[name] - value) <= allowed, (step, name, own[name], value)
