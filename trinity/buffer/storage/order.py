"""The order of a queue: first in first out, or by priority with reuse. No waiting, no processes."""

import heapq
import itertools
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from trinity.buffer.storage.priority import PriorityFunction, uses_of
from trinity.common.experience import Experience


@dataclass
class Item:
    """Experiences as they were written, in one list, and the rows they have in the journal."""

    ids: list[int]
    experiences: list[Experience]

    def __len__(self) -> int:
        return len(self.experiences)


class Order(Protocol):
    """Items that wait. ``size`` counts experiences; ``reuses``: some are read more than once."""

    size: int
    reuses: bool

    def has_room(self, count: int) -> bool:
        """Whether an item of ``count`` experiences may be put now; if not, the writer waits."""
        ...

    def put(self, item: Item) -> list[Item]:
        """Take an item in; returns those that had to leave for it (maybe itself)."""
        ...

    def wake(self, now: float) -> list[Item]:
        """Put back what has cooled down by ``now``; returns those that had to leave for it."""
        ...

    def get(self, now: float) -> Item | None:
        """The next item, taken out; None if none is ready. It cools down from ``now`` on."""
        ...

    def is_reusable(self, experiences: list[Experience]) -> bool:
        """Whether what was read may be read again."""
        ...

    def items(self) -> list[Item]:
        """All items, also those that cool down, in the order they would be put back in."""
        ...

    def next_ready(self) -> float | None:
        """When an item that is not ready will be; None if there is none."""
        ...


class FifoOrder:
    """First in, first out. An item larger than the whole capacity may enter when all is empty."""

    reuses = False

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self._items: deque[Item] = deque()

    def has_room(self, count: int) -> bool:
        return self.size == 0 or self.size + count <= self.capacity

    def put(self, item: Item) -> list[Item]:
        self._items.append(item)
        self.size += len(item)
        return []

    def wake(self, now: float) -> list[Item]:
        return []

    def get(self, now: float) -> Item | None:
        if not self._items:
            return None
        item = self._items.popleft()
        self.size -= len(item)
        return item

    def is_reusable(self, experiences: list[Experience]) -> bool:
        return False

    def items(self) -> list[Item]:
        return list(self._items)

    def next_ready(self) -> float | None:
        return None


class PriorityOrder:
    """Highest priority first, the oldest of equals; what was read comes back after a while.

    When it is full, a new item takes the place of the oldest of those with the lowest priority,
    or is dropped if its own is lower still: writers never wait.

    Args:
        capacity: Experiences that may wait; those that are cooling down don't count.
        cooldown_s: Seconds from a read until the item may be read again; None: never.
    """

    def __init__(
        self, capacity: int, priority_fn: PriorityFunction, cooldown_s: float | None
    ) -> None:
        self.capacity = capacity
        self.size = 0
        self._priority_fn = priority_fn
        self._cooldown_s = cooldown_s
        self.reuses = cooldown_s is not None
        self._buckets: dict[float, deque[Item]] = {}
        self._cooling: list[tuple[float, int, Item]] = []
        self._counter = itertools.count()

    def has_room(self, count: int) -> bool:
        return True

    def put(self, item: Item) -> list[Item]:
        priority, _ = self._priority_fn(item.experiences)
        left: list[Item] = []
        while self.size and self.size + len(item) > self.capacity:
            lowest = min(self._buckets)
            if priority < lowest:
                return [*left, item]
            left.append(self._take(lowest))
        self._buckets.setdefault(priority, deque()).append(item)
        self.size += len(item)
        return left

    def wake(self, now: float) -> list[Item]:
        left: list[Item] = []
        while self._cooling and self._cooling[0][0] <= now:
            left += self.put(heapq.heappop(self._cooling)[2])
        return left

    def get(self, now: float) -> Item | None:
        if not self._buckets:
            return None
        item = self._take(max(self._buckets))
        used = [with_uses(e, uses_of(e) + 1) for e in item.experiences]
        item = Item(item.ids, used)
        if self._cooldown_s is not None and self.is_reusable(used):
            heapq.heappush(self._cooling, (now + self._cooldown_s, next(self._counter), item))
        return Item(item.ids, [with_uses(e, uses_of(e)) for e in used])

    def is_reusable(self, experiences: list[Experience]) -> bool:
        return self.reuses and self._priority_fn(experiences)[1]

    def items(self) -> list[Item]:
        waiting = [item for bucket in self._buckets.values() for item in bucket]
        return waiting + [item for _, _, item in sorted(self._cooling, key=lambda c: c[:2])]

    def next_ready(self) -> float | None:
        return self._cooling[0][0] if self._cooling else None

    def _take(self, priority: float) -> Item:
        bucket = self._buckets[priority]
        item = bucket.popleft()
        if not bucket:
            del self._buckets[priority]
        self.size -= len(item)
        return item


def with_uses(experience: Experience, uses: int) -> Experience:
    """A copy with another use count; its tensors are shared, so whoever reads it replaces them."""
    copy = object.__new__(Experience)
    copy.__dict__ = {**experience.__dict__, "info": {**experience.info, "use_count": uses}}
    copy.metrics = dict(experience.metrics)
    return copy
