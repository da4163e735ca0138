"""Engines of both trainers with equal settings, and steps of PPO on them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from tests.trainer.backends.process_ranks import rank_group
from tests.trainer.toy import groups, multi_turn
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.rank_group import RankGroup
from trinity.trainer.backends.torch.schedule import Schedule
from trinity.trainer.backends.torch.settings import CriticSettings, TorchEngineSettings
from trinity.trainer.backends.torch.sharding import RankSettings
from trinity.trainer.backends.verl.rank import VerlTrainRank
from trinity.trainer.backends.verl.settings import VerlEngineSettings
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective
from trinity.trainer.value_loss import ValueObjective

GRPO = Objective.from_names(
    "ppo", entropy_loss_fn="default", entropy_loss_fn_args={"entropy_coef": 0.01}
)
VALUES = ValueObjective(0.5)


def settings(folder: str, *, has_critic: bool = False, **changes: object) -> TorchEngineSettings:
    """Rates that move: warm-up, then a cosine; micro-batches of a few rows."""
    rule = MicroBatchRule(max_tokens=90)
    schedule = Schedule("cosine", warmup_steps=2, total_steps=8, min_ratio=0.1)
    optimizer = OptimizerSettings(lr=3e-3, schedule=schedule)
    critic = CriticSettings(folder, OptimizerSettings(lr=1e-2), rule) if has_critic else None
    given = {"dtype": "float32", "optimizer": optimizer, "micro_batches": rule, "critic": critic}
    return TorchEngineSettings(folder, **{**given, **changes})


def for_verl(given: TorchEngineSettings, **changes: object) -> VerlEngineSettings:
    return VerlEngineSettings.of(given, **changes)


@asynccontextmanager
async def torch_engine(given: TorchEngineSettings) -> AsyncIterator[TorchTrainEngine]:
    engine = TorchTrainEngine(given)
    await engine.prepare()
    yield engine
    await engine.close()


@asynccontextmanager
async def verl_engine(
    given: TorchEngineSettings, world_size: int = 1, channel: object = None, **changes: object
) -> AsyncIterator[RankGroup]:
    """veRL in this process, or in several."""
    own = for_verl(given, **changes)
    if world_size > 1:
        with rank_group(own, world_size, VerlTrainRank) as group:
            await group.prepare()
            yield group
        return
    group = RankGroup([VerlTrainRank(own, channel, RankSettings(0, 1, timeout_s=60))], own)
    try:
        await group.prepare()
        yield group
    finally:
        await group.close()


def rows(seed: int) -> TrainBatch:
    """Groups of rows, some with gaps, some without advantage, one masked throughout."""
    experiences = [*groups(4, 3, seed=seed), *multi_turn(seed=seed)]
    for experience in experiences[3:6]:
        experience.advantages = torch.zeros(experience.response_length)
    for number, experience in enumerate(experiences[12:]):
        experience.eid.task, experience.eid.run = 99, number
    experiences[0].action_mask[:] = False
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
    """All metrics of all steps, relative to their size."""
    assert len(found) == len(wanted)
    for step, (own, other) in enumerate(zip(found, wanted, strict=True)):
        assert set(own) == set(other)
        for name, value in other.items():
            allowed = tolerance * max(1.0, abs(value))
            assert abs(own[name] - value) <= allowed, (step, name, own[name], value)
