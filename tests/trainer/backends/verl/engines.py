"""Engines of both trainers with equal settings."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.trainer.backends.process_ranks import rank_group
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.rank_group import RankGroup
from trinity.trainer.backends.torch.schedule import Schedule
from trinity.trainer.backends.torch.settings import CriticSettings, TorchEngineSettings
from trinity.trainer.backends.torch.sharding import RankSettings
from trinity.trainer.backends.verl.rank import VerlTrainRank
from trinity.trainer.backends.verl.settings import VerlEngineSettings


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
