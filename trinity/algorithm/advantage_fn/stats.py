"""Statistics of a group's rewards that depend on neither their order nor their size.

Sums are exact before their one rounding (`math.fsum`) and taken from the smallest reward: in any
order they are bitwise the same, and equal rewards have a deviation of exactly 0.
"""

import math
import random
from collections.abc import Sequence
from zlib import crc32

from trinity.common.experience import EID


def finite_reward(reward: float | None, uid: str) -> float:
    """The reward as a number that can be averaged.

    Raises:
        ValueError: It is missing, NaN or infinite.
    """
    if reward is None:
        raise ValueError(
            f"Experience {uid} has no reward: set `experience.reward` in the workflow, or leave "
            "the experience out (operator invalid_reward_filter)."
        )
    if not math.isfinite(reward):
        raise ValueError(
            f"Experience {uid} has the reward {reward}: a reward must be a finite number. Fix the "
            "reward function, or drop the experience (operator invalid_reward_filter)."
        )
    return float(reward)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one number."""
    base = min(values)
    return base + math.fsum(value - base for value in values) / len(values)


def std(values: Sequence[float], unbiased: bool = True) -> float:
    """Standard deviation; 0 for a single number."""
    degrees = len(values) - int(unbiased)
    if degrees <= 0:
        return 0.0
    center = mean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / degrees)


def ranks(values: Sequence[float]) -> list[float]:
    """0 for the smallest; equal values share the mean of their places."""
    below = [sum(other < value for other in values) for value in values]
    equal = [values.count(value) for value in values]
    return [low + (same - 1) / 2 for low, same in zip(below, equal, strict=True)]


def place(eid: EID) -> tuple[str, int, int]:
    """Where an experience stands in its batch, the same in a repeated run: task, run, step."""
    return eid.tid, eid.run, eid.step


def stream_of(eids: Sequence[EID]) -> random.Random:
    """A random stream that depends on which experiences there are, not on their order."""
    return random.Random(crc32(repr(sorted(map(place, eids))).encode()))
