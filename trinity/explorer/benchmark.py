"""`mode: bench`: evaluate the starting model and the checkpoints of a job, one after the other."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trinity.common.experience import Experience
from trinity.common.models.protocol import WeightTicket
from trinity.common.workflows import Task
from trinity.explorer.explorer import Explorer
from trinity.utils.metrics import Metrics


@dataclass(frozen=True)
class Candidate:
    """Weights to evaluate. ``open`` reads them and gives a ticket for the engines."""

    step: int
    open: Callable[[], WeightTicket]


class NoTasks:
    """The tasks of a run that only evaluates: none."""

    async def next_batch(self) -> list[Task]:
        raise StopAsyncIteration

    def feedback(self, metrics: Mapping[str, object]) -> None: ...

    def metrics(self) -> Metrics:
        return {}

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None: ...


class NoSink:
    """Where the experiences of a run go that only evaluates: nowhere, there are none."""

    async def process(self, experiences: list[Experience]) -> dict[str, object]:
        return {}

    async def flush(self, until: int) -> None: ...

    async def close(self) -> None: ...


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
        """All evaluations, reported one by one.

        Raises:
            RuntimeError: All tasks of all evaluations failed.
        """
        if self.includes_start:
            await self.explorer.evaluate()
        for candidate in self.candidates:
            await self.explorer.load(await asyncio.to_thread(candidate.open))
            self.explorer.step = candidate.step
            await self.explorer.evaluate()
        self.explorer.refuse_evaluations_without_a_score()
