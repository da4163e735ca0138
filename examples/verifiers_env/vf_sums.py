"""A `verifiers` environment: sums, with the reward 1 for a reply that holds the right number."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumConfig(vf.TasksetConfig):
    largest: int = 9
    """Largest number to be added to itself."""


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in str(trace.assistant_messages[-1].content))


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> Iterator[SumTask]:
        for number in range(1, self.config.largest + 1):
            data = SumData(prompt=f"What is {number} + {number}?", answer=str(2 * number))
            yield SumTask(data, self.config.task)
