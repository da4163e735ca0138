"""Which experiences of a replay buffer are used first: `PRIORITY_FUNC`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trinity.utils.registry import Registry

if TYPE_CHECKING:
    from trinity.common.experience import Experience


class PriorityFunction(ABC):
    """Rates a list of experiences, as it was written."""

    @abstractmethod
    def __call__(self, item: Sequence[Experience]) -> tuple[float, bool]:
        """Its priority (higher comes first), and whether it may be used again after this time."""


class LinearDecay(PriorityFunction):
    """Newer weights first; each use takes ``decay`` versions off: ``version - decay * uses``."""

    def __init__(self, decay: float = 2.0) -> None:
        self.decay = decay

    def __call__(self, item: Sequence[Experience]) -> tuple[float, bool]:
        return version_of(item[0]) - self.decay * uses_of(item[0]), True


class LinearDecayUseCountControlRandomization(PriorityFunction):
    """`LinearDecay` with normal noise of deviation ``sigma``, up to ``use_count_limit`` uses.

    A limit of 0 or less is none. The noise comes from a stream of ``seed``.
    """

    def __init__(
        self, decay: float = 2.0, use_count_limit: int = 3, sigma: float = 0.0, seed: int = 42
    ) -> None:
        self.decay = decay
        self.use_count_limit = use_count_limit
        self.sigma = sigma
        self._generator = np.random.default_rng(seed)

    def __call__(self, item: Sequence[Experience]) -> tuple[float, bool]:
        priority = version_of(item[0]) - self.decay * uses_of(item[0])
        if self.sigma > 0:
            priority += self.sigma * float(self._generator.standard_normal())
        is_reusable = self.use_count_limit <= 0 or uses_of(item[0]) < self.use_count_limit
        return priority, is_reusable


def version_of(experience: Experience) -> int:
    """Version of the weights it was sampled with; 0 if it doesn't say."""
    return int(experience.info.get("model_version") or 0)  # type: ignore[call-overload]  # a number


def uses_of(experience: Experience) -> int:
    """Times it was read."""
    return int(experience.info.get("use_count") or 0)  # type: ignore[call-overload]  # a number


_LIMITED = f"{__name__}.LinearDecayUseCountControlRandomization"
PRIORITY_FUNC: Registry[type[PriorityFunction]] = Registry(
    "priority function",
    {
        "linear_decay": f"{__name__}.LinearDecay",
        "linear_decay_use_count_control_randomization": _LIMITED,
        "decay_limit_randomization": _LIMITED,
    },
)
