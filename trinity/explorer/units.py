"""What scheduler, pool and runner exchange: units of work and their results."""

import hashlib
from dataclasses import dataclass, field

from trinity.common.workflows import Task


@dataclass(frozen=True)
class Unit:
    """Some runs of one task, done at once in one slot of a runner.

    Args:
        unit_id: Unique in the life of a scheduler.
        runs: Numbers of the runs, within 0 .. ``task.repeat_times - 1``.
        seed: Seed of the whole task; each run's own is derived from it.
        timeout_s: Seconds each run may take.
        attempt: How often these runs have failed before.
    """

    unit_id: int
    task: Task
    runs: tuple[int, ...]
    seed: int
    timeout_s: float
    attempt: int = 0


@dataclass
class RunResult:
    """What became of one run.

    ``error`` is None if it succeeded; ``dropped`` lists why samples of it were left out. With
    ``is_fatal`` or ``is_not_set_up`` the job ends with the error.
    """

    run: int
    error: str | None = None
    is_timeout: bool = False
    is_fatal: bool = False
    is_not_set_up: bool = False
    seconds: float = 0.0
    num_experiences: int = 0
    metrics: list[dict[str, float]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


@dataclass
class UnitResult:
    """What became of a unit: its runs, and their experiences as `serialize_many` bytes."""

    unit_id: int
    runs: list[RunResult]
    payload: bytes = b""
    seconds: float = 0.0
    num_stuck: int = 0


def stable_seed(*parts: object) -> int:
    """A seed of 62 bits that depends on nothing but the values of ``parts``."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2
