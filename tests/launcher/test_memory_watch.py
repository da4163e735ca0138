import multiprocessing
import time
from collections.abc import Callable

from trinity.launcher.memory_watch import Bound, Growth, MemoryWatch, Usage


def _hold(megabytes: int, started, done) -> None:
    block = bytearray(megabytes * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    started.set()
    done.wait(100)


def _wait_for(is_so: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_memory_of_children_counts() -> None:
    context = multiprocessing.get_context("spawn")
    started, done = context.Event(), context.Event()
    with MemoryWatch(every_s=0.05) as before:
        _wait_for(lambda: before.peak_mb > 0)
    with MemoryWatch(every_s=0.05) as watch:
        child = context.Process(target=_hold, args=(100, started, done))
        child.start()
        assert started.wait(60)
        _wait_for(lambda: watch.peak_mb > before.peak_mb + 90)
        done.set()
        child.join(60)


def test_growth_after_a_fall_is_seen() -> None:
    growth = Growth(1.01)
    values = [470, 471, 940, 480, 570, 571, 576]
    assert [value for value in values if growth.shows(value)] == [470, 940, 570, 576]


def test_the_bound_knows_what_is_shared_once_it_was_looked_at() -> None:
    bound = Bound()
    assert bound.of(Usage(100, 300, 80)) == 400
    bound.learn(Usage(100, 300, 80), used=190)
    assert bound.of(Usage(120, 300, 80)) == 210
    assert bound.of(Usage(120, 350, 80)) == 260
    assert bound.of(Usage(120, 50, 40)) == 210
    bound.learn(Usage(120, 50, 40), used=170)
    assert bound.of(Usage(120, 50, 40)) == 170


def test_the_bound_is_what_is_used_while_nothing_else_is_shared() -> None:
    bound, pids = Bound(), frozenset({1, 2})
    then = Usage(1000, 300, 80, pids)
    assert not bound.is_tight(then)
    bound.learn(then, used=1090)
    grown = Usage(2000, 301, 80, pids)
    assert bound.is_tight(grown) and bound.of(grown) == 2091
    assert not bound.is_tight(Usage(2000, 320, 80, pids)), "shared by some, or one's own file"
    assert not bound.is_tight(Usage(2000, 280, 80, pids))
    assert not bound.is_tight(Usage(2000, 300, 80, frozenset({1, 2, 3}))), "it may be a fork"


def test_after_a_look_at_a_process_just_forked_the_bound_is_not_taken_for_the_truth() -> None:
    bound, pids = Bound(), frozenset({1, 2})
    forked = Usage(800, 140, 70, pids)
    bound.learn(forked, used=470)
    assert bound.of(forked) == 870 and not bound.is_tight(forked)


def test_a_look_at_a_process_just_forked_hides_no_later_growth() -> None:
    bound = Bound()
    bound.learn(Usage(800, 140, 70), used=470)
    assert bound.of(Usage(500, 70, 70)) == 570
