"""The plain strategy: whatever the buffer gives next."""

from trinity.algorithm.sample_strategy.base import Metrics, SampleStrategy
from trinity.common.experience import Experience


class DefaultSampleStrategy(SampleStrategy):
    """Reads ``batch_size`` experiences from the experience buffer."""

    async def read(self, step: int) -> tuple[list[Experience], Metrics]:
        return await self.reader.read(self.batch_size), {}
