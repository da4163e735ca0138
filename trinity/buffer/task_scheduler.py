"""Which tasks a step works on, over several tasksets; the position is exact on resume."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from trinity.buffer.rows import DataError
from trinity.buffer.taskset import Taskset, open_taskset
from trinity.common.config.buffer import TasksetConfig
from trinity.common.constants import SELECTOR_METRIC
from trinity.common.workflows import Task

_log = logging.getLogger(__name__)


class TaskScheduler:
    """The tasks of each step.

    Several tasksets are mixed by size: a shuffled list holds each taskset's number once a task,
    and a step takes the next ``batch_size`` numbers of it. The tasks of a step come grouped by
    taskset.

    Args:
        tasksets: At least one.
        batch_size: Tasks a step.
        total_steps: Steps to give tasks for; None: as many full batches as ``total_epochs`` hold.
    """

    def __init__(
        self,
        tasksets: Sequence[Taskset],
        batch_size: int,
        *,
        total_steps: int | None = None,
        total_epochs: int = 1,
    ) -> None:
        self.tasksets = list(tasksets)
        self.batch_size = batch_size
        self.step = 0
        self._num_tasks = sum(map(len, self.tasksets))
        full_batches = total_epochs * self._num_tasks // batch_size
        self.total_steps = full_batches if total_steps is None else total_steps
        self._order: tuple[int, np.ndarray] | None = None
        self._places = list(range(len(self.tasksets)))
        """Numbers of the tasksets in the order in which the run began with them."""

    async def next_batch(self) -> list[Task]:
        """The tasks of the next step; `StopAsyncIteration` when there are none left."""
        if self.step >= self.total_steps:
            raise StopAsyncIteration
        counts = self._counts(self.step)
        self.step += 1
        return [task for i, count in counts.items() for task in self.tasksets[i].next_tasks(count)]

    def feedback(self, metrics: Mapping[str, object]) -> None:
        """Hand what a step found out of its tasks to the selectors of their tasksets."""
        found = metrics.get(SELECTOR_METRIC)
        if not isinstance(found, Mapping):
            return
        for taskset_id, seen in found.items():
            self.tasksets[int(taskset_id)].selector.feedback(seen["indices"], seen["values"])

    def metrics(self) -> dict[str, float]:
        """Numbers about the selection, as ``selection/<taskset>/<name>``."""
        return {
            f"selection/{taskset.name}/{name}": value
            for taskset in self.tasksets
            for name, value in {
                **taskset.selector.metrics(),
                **({"bad_rows": float(taskset.num_bad)} if taskset.num_bad else {}),
            }.items()
        }

    def state_dict(self) -> dict[str, object]:
        return {
            "step": self.step,
            "tasksets": [self.tasksets[place].state_dict() for place in self._places],
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        saved = state["tasksets"]
        assert isinstance(saved, list)
        if len(saved) != len(self.tasksets):
            raise DataError(
                f"There are {len(self.tasksets)} tasksets now, but there were {len(saved)} when "
                "the checkpoint was saved: where each of them stands can't be told. Restore them, "
                "or start under a new name."
            )
        self._places, self._order = self._places_of(saved), None
        for place, inner in zip(self._places, saved, strict=True):
            self.tasksets[place].load_state_dict(inner)
        self.step = int(state["step"])  # type: ignore[call-overload]  # from state_dict

    def _places_of(self, saved: Sequence[Mapping[str, object]]) -> list[int]:
        """Number of each taskset of a state: it may stand elsewhere now.

        It is known by its rows' source, or by its name if sources changed or are alike; if neither
        tells, by its place.
        """
        for known_by in ("source", "name"):
            before = [inner.get(known_by) for inner in saved]
            now = [getattr(taskset, known_by) for taskset in self.tasksets]
            if len(set(now)) == len(now) and set(before) == set(now):
                return [now.index(one) for one in before]
        return list(range(len(saved)))

    def _counts(self, step: int) -> dict[int, int]:
        """Taskset -> tasks it gives in a step, in order of first appearance."""
        if len(self.tasksets) == 1:
            return {0: self.batch_size}
        ids: list[int] = []
        position = step * self.batch_size
        while len(ids) < self.batch_size:
            epoch, start = divmod(position + len(ids), self._num_tasks)
            ids += self._order_of(epoch)[start : start + self.batch_size - len(ids)].tolist()
        return dict(Counter(ids))

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            sizes = [len(self.tasksets[place]) for place in self._places]
            order = np.repeat(np.array(self._places), sizes)
            np.random.default_rng(epoch).shuffle(order)
            self._order = epoch, order
        return self._order[1]


def open_tasksets(configs: Sequence[TasksetConfig]) -> list[Taskset]:
    """The training tasksets of a run.

    Raises:
        DataError: One of them can't be used.
    """
    return [open_taskset(config, taskset_id=i) for i, config in enumerate(configs)]


def read_all(config: TasksetConfig, taskset_id: int = 0) -> list[Task]:
    """Every task of a taskset, to evaluate on.

    Raises:
        DataError: It can't be used.
    """
    return open_taskset(config, taskset_id=taskset_id, is_eval=True).all_tasks()
