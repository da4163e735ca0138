import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.common.constants import SyncStyle
from trinity.synchronizer.schedule import SyncSchedule, TrainerRhythm

STEPS = 24


def steps(is_due) -> list[int]:
    return [step for step in range(1, 13) if is_due(step)]


def test_every_step_on_policy() -> None:
    schedule = SyncSchedule()
    assert steps(schedule.is_explorer_due) == list(range(1, 13))
    assert [schedule.version_due(step) for step in (1, 2, 3)] == [1, 2, 3]
    assert steps(lambda step: schedule.is_trainer_due(step, False)) == list(range(1, 13))
    assert schedule.max_off_policy == 0


def test_one_step_off() -> None:
    schedule = SyncSchedule(offset=1)
    assert steps(schedule.is_explorer_due) == list(range(2, 13))
    assert [schedule.version_due(step) for step in (1, 2, 3)] == [0, 1, 2]
    assert schedule.max_off_policy == 1


def test_interval_and_offset() -> None:
    schedule = SyncSchedule(interval=3, offset=2)
    assert steps(schedule.is_explorer_due) == [5, 8, 11]
    assert [schedule.version_due(step) for step in (5, 8, 11)] == [3, 6, 9]
    assert steps(lambda step: schedule.is_trainer_due(step, False)) == [3, 6, 9, 12]
    assert schedule.max_off_policy == 4


def test_several_trainer_steps_a_batch() -> None:
    schedule = SyncSchedule(interval=2, trainer_steps=Fraction(3, 2))
    assert [schedule.version_due(step) for step in (2, 4, 6)] == [3, 6, 9]
    assert steps(lambda step: schedule.is_trainer_due(step, False)) == [3, 6, 9, 12]


def test_the_explorer_drives() -> None:
    schedule = SyncSchedule(SyncStyle.EXPLORER_DRIVEN, interval=2)
    assert steps(schedule.is_explorer_due) == [2, 4, 6, 8, 10, 12]
    assert schedule.is_trainer_due(1, True) and not schedule.is_trainer_due(2, False)
    assert schedule.version_due(2) is None and schedule.max_off_policy is None


@pytest.mark.parametrize("style", [SyncStyle.TRAINER_DRIVEN, SyncStyle.FULLY_ASYNC])
def test_the_trainer_drives(style: SyncStyle) -> None:
    schedule = SyncSchedule(style, interval=3, trainer_interval=2)
    every_step = style is SyncStyle.FULLY_ASYNC
    assert steps(schedule.is_explorer_due) == (list(range(1, 13)) if every_step else [3, 6, 9, 12])
    assert steps(lambda step: schedule.is_trainer_due(step, True)) == [2, 4, 6, 8, 10, 12]
    assert schedule.version_due(3) is None and schedule.max_off_policy is None


class Run:
    """An explorer and a trainer that obey a schedule, step by step in any order.

    The explorer writes ``written`` rows a step, the trainer reads ``read`` rows, first in first
    out. The queue is unbounded, so only weights hold the explorer back.
    """

    def __init__(self, schedule: SyncSchedule, written: int, read: int) -> None:
        self.schedule, self.written, self.read = schedule, written, read
        self.explored = self.trained = self.published = self.version = 0
        self.queue: list[int] = []
        self.waits_for: int | None = None
        self.lags: list[int] = []

    def can_explore(self) -> bool:
        if self.waits_for is not None and self.published >= self.waits_for:
            self.version, self.waits_for = self.published, None
        return self.waits_for is None and self.explored < STEPS

    def explore(self) -> None:
        self.explored += 1
        self.queue += [self.version] * self.written
        if self.schedule.is_explorer_due(self.explored):
            self.waits_for = self.schedule.version_due(self.explored)

    def can_train(self) -> bool:
        return len(self.queue) >= self.read

    def train(self) -> None:
        batch, self.queue = self.queue[: self.read], self.queue[self.read :]
        self.lags.append(self.trained - min(batch))
        self.trained += 1
        if self.schedule.is_trainer_due(self.trained, False):
            self.published = self.trained


@given(
    interval=st.integers(1, 5),
    offset=st.integers(0, 4),
    written=st.integers(1, 6),
    read=st.integers(1, 6),
    eagerness=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_no_experience_is_older_than_the_bound(
    interval: int, offset: int, written: int, read: int, eagerness: float, seed: int
) -> None:
    schedule = SyncSchedule(interval=interval, offset=offset, trainer_steps=Fraction(written, read))
    run = Run(schedule, written, read)
    chance = random.Random(seed)
    while run.can_explore() or run.can_train():
        wants_explore = chance.random() < eagerness
        if run.can_explore() and (wants_explore or not run.can_train()):
            run.explore()
        else:
            run.train()
    assert run.explored == STEPS, "deadlock"
    assert run.trained == STEPS * written // read
    assert schedule.max_off_policy is not None
    assert max(run.lags, default=0) <= schedule.max_off_policy


@pytest.mark.parametrize(("written", "read"), [(1, 1), (2, 1), (3, 2), (1, 2), (2, 3)])
@pytest.mark.parametrize(("interval", "offset"), [(1, 0), (1, 1), (2, 0), (3, 2)])
def test_the_bound_is_reached(interval: int, offset: int, written: int, read: int) -> None:
    schedule = SyncSchedule(interval=interval, offset=offset, trainer_steps=Fraction(written, read))
    run = Run(schedule, written, read)
    while run.can_explore() or run.can_train():
        if run.can_explore():
            run.explore()
        else:
            run.train()
    assert max(run.lags) == schedule.max_off_policy


@given(
    interval=st.integers(1, 5),
    offset=st.integers(0, 4),
    written=st.integers(1, 6),
    read=st.integers(1, 6),
    published_every=st.integers(1, 4),
)
def test_an_explorer_waits_only_for_what_a_trainer_of_another_command_will_publish(
    interval: int, offset: int, written: int, read: int, published_every: int
) -> None:
    """The trainer knows nothing of the explorer, which is told what it has to know."""
    trainer = SyncSchedule(interval=published_every)
    told = TrainerRhythm(read, trainer.publication_interval)
    explorer = SyncSchedule(interval=interval, offset=offset, rows=written).beside(told)
    for step in filter(explorer.is_explorer_due, range(1, 60)):
        version = explorer.version_due(step)
        assert version is not None
        assert version * read <= (step - offset) * written, "needs data that isn't there"
        assert version == 0 or trainer.is_trainer_due(version, False)


@given(st.integers(1, 6), st.integers(0, 5), st.integers(1, 7), st.integers(1, 7))
def test_every_version_waited_for_is_published(
    interval: int, offset: int, written: int, read: int
) -> None:
    schedule = SyncSchedule(interval=interval, offset=offset, trainer_steps=Fraction(written, read))
    for step in filter(schedule.is_explorer_due, range(1, 60)):
        version = schedule.version_due(step)
        assert version is not None
        assert version * read <= (step - offset) * written, "needs data that isn't there"
        if version:
            assert schedule.is_trainer_due(version, False)
    assert math.isfinite(schedule.max_off_policy or 0)
