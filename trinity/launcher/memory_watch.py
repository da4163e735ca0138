"""Peak memory of a process and all below it, watched from beside at little cost."""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import psutil

_SAMPLE_EVERY_S = 2.0
_WORTH_A_WALK = 1.003  # growth: the peak is that exact


class Growth:
    """Says of a row of numbers where they have grown since they were last looked at, or fallen.

    A fall counts: a process that has just been forked seems as large as its parent.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._reference = 0.0

    def shows(self, value: float) -> bool:
        """Whether ``value`` is above ``factor`` times the least since the last that was."""
        has_grown = value > self._reference * self._factor
        self._reference = value if has_grown else min(self._reference, value)
        return has_grown


class Usage(NamedTuple):
    """Bytes of memory of several processes, pages that two of them have counted twice.

    Args:
        own: Pages that are no file's and not shared memory.
        shared: The others.
        most_shared: The others of the process that has most of them.
        pids: The processes.
    """

    own: int
    shared: int
    most_shared: int
    pids: frozenset[int] = frozenset()


class Bound:
    """The most that several processes may use, shared pages counted once, without a look at these.

    Whoever has looked says what it was: it is taken that what is shared goes on as it was.
    """

    def __init__(self) -> None:
        self._shared_once = 0
        self._shared_then = 0
        self._pids: frozenset[int] = frozenset()
        self._was_found = False

    def of(self, usage: Usage) -> int:
        """An upper bound in bytes."""
        return usage.own + self._shared_once + max(0, usage.shared - self._shared_then)

    def is_tight(self, usage: Usage) -> bool:
        """Whether the same processes share what they shared: then the bound is what they use.

        Not after a look that found less than the bound, as where pages of a fork are shared.
        """
        change = abs(usage.shared - self._shared_then)
        is_same = usage.pids == self._pids and change <= (_WORTH_A_WALK - 1) * self.of(usage)
        return is_same and self._was_found

    def learn(self, usage: Usage, used: int) -> None:
        """``used`` bytes were found at ``usage``.

        Of a process that has just been forked the system counts its parent's pages as its own:
        then less is left for what is shared than one process has of it.
        """
        self._shared_once = max(used - usage.own, usage.most_shared)
        self._was_found = usage.own + self._shared_once <= used * _WORTH_A_WALK
        self._shared_then, self._pids = usage.shared, usage.pids


class MemoryWatch:
    """Peak memory of a process and all below it, shared pages counted once (PSS).

    A context manager: samples in a thread of its own while the block runs. Sharing is looked at
    only when a new peak is possible and something new is shared: the system walks through all
    pages for it, and stops the process meanwhile, 7% of two cores for a run of 6 GB.

    Args:
        pid: The process; None: this one.
    """

    def __init__(self, pid: int | None = None, every_s: float = _SAMPLE_EVERY_S) -> None:
        self.peak_mb = 0.0
        self._pid = pid
        self._bound = Bound()
        self._growth = Growth(_WORTH_A_WALK)
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=10)

    def _watch(self) -> None:
        while True:
            self._sample()
            if self._ended.wait(self._every_s):
                return

    def _sample(self) -> None:
        try:
            root = psutil.Process(self._pid)
            family = [root, *root.children(recursive=True)]
        except psutil.Error:
            return
        usage = _usage(family)
        most = self._bound.of(usage)
        may_be_peak = most > self.peak_mb * 2**20 * _WORTH_A_WALK
        if self._growth.shows(most) and may_be_peak:
            used = most
            if not self._bound.is_tight(usage):
                used = sum(map(_used, family))
                self._bound.learn(usage, used)
            self.peak_mb = max(self.peak_mb, used / 2**20)


def _usage(family: Sequence[psutil.Process]) -> Usage:
    own = shared = most = 0
    for process in family:
        try:
            info = process.memory_info()
        except psutil.Error:
            continue
        of_others = getattr(info, "shared", 0)
        own, shared = own + info.rss - of_others, shared + of_others
        most = max(most, of_others)
    return Usage(own, shared, most, frozenset(process.pid for process in family))


def _used(process: psutil.Process) -> int:
    """Bytes of a process with its share of shared pages, if the system tells; 0 if it has ended."""
    try:
        info = process.memory_full_info()
    except psutil.Error:
        return 0
    return int(getattr(info, "pss", info.rss))
