"""`mode: bench`: evaluate the starting model and the checkpoints of a job, one after the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trinity.common.models.protocol import WeightTicket
from trinity.explorer.explorer import Explorer


@dataclass(frozen=True)
class Candidate:
    """Weights to evaluate. ``open`` reads them and gives a ticket for the engines."""

    step: int
    open: Callable[[], WeightTicket]


@dataclass
class Benchmark:
    """Evaluates each candidate with an explorer's engines and tasks.

    Args:
        explorer: Its settings' ``metric_prefix`` is "bench".
        candidates: In the order of their steps.
        includes_start: Also evaluate the model as it was before training, as step 0.
    """

    explorer: Explorer
    candidates: Sequence[Candidate]
    includes_start: bool = True

    async def run(self) -> None:
        """All evaluations, reported one by one."""
        if self.includes_start:
            await self.explorer.evaluate()
        for candidate in self.candidates:
            await self.explorer.load(candidate.open())
            self.explorer.step = candidate.step
            await self.explorer.evaluate()
