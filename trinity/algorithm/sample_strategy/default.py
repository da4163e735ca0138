"""The strategies that read the experience buffer alone."""

import math
import warnings
from collections.abc import Mapping

from trinity.algorithm.sample_strategy.base import (
    ExperienceSource,
    Metrics,
    SampleStrategy,
    oldest_version,
)
from trinity.common.experience import Experience


class DefaultSampleStrategy(SampleStrategy):
    """Reads ``batch_size`` experiences, whatever the buffer gives next."""

    async def read(self, step: int) -> tuple[list[Experience], Metrics]:
        return await self.reader.read(self.batch_size, step=step), {}


class WarmupSampleStrategy(DefaultSampleStrategy):
    """The old name of `default`; a warm-up is a stage of its own now."""

    def __init__(
        self,
        reader: ExperienceSource,
        batch_size: int,
        auxiliary: Mapping[str, ExperienceSource] | None = None,
    ) -> None:
        warnings.warn("sample_strategy 'warmup' is now called 'default'.", stacklevel=2)
        super().__init__(reader, batch_size, auxiliary)


class StalenessControlSampleStrategy(SampleStrategy):
    """Reads experiences no token of which is older than ``max_staleness`` versions.

    At step s the policy that is trained has seen s - 1 updates, so a token of version
    ``s - 1 - max_staleness`` is the oldest to be let in. Older experiences are dropped and counted.

    Args:
        max_staleness: Versions that an experience may lag behind; infinity sets no bound.
    """

    def __init__(
        self,
        reader: ExperienceSource,
        batch_size: int,
        auxiliary: Mapping[str, ExperienceSource] | None = None,
        *,
        max_staleness: float = math.inf,
    ) -> None:
        if max_staleness < 0:
            raise ValueError(f"max_staleness is {max_staleness}; it must be 0 or more.")
        super().__init__(reader, batch_size, auxiliary)
        self.max_staleness = max_staleness

    async def read(self, step: int) -> tuple[list[Experience], Metrics]:
        least = math.ceil(max(step - self.max_staleness - 1, 0))
        fresh: list[Experience] = []
        num_dropped = 0
        while len(fresh) < self.batch_size:
            missing = self.batch_size - len(fresh)
            try:
                exps = await self.reader.read(missing, min_model_version=least, step=step)
            except StopAsyncIteration:
                if fresh:
                    break
                raise
            kept = [e for e in exps if _is_fresh(e, least)]
            num_dropped += len(exps) - len(kept)
            fresh += kept
            if len(exps) < missing:  # the buffer gave an incomplete batch: there is no more for now
                break
        return fresh, {"sample/stale_dropped": float(num_dropped)}


def _is_fresh(experience: Experience, least: int) -> bool:
    version = oldest_version(experience)
    return version is None or version >= least
