"""What share of a task's runs succeeded, for selectors with a curriculum."""

import math
from collections.abc import Mapping

import numpy as np

from trinity.buffer.operators.base import ExperienceOperator, Processed
from trinity.common.constants import SELECTOR_METRIC
from trinity.common.experience import Experience
from trinity.utils.metrics import Metrics


class PassRateCalculator(ExperienceOperator):
    """Hands the mean reward of each task to the selector of its taskset.

    It must stand before operators that leave experiences out, and rewards should be in [0, 1].
    """

    def process(self, exps: list[Experience]) -> Processed:
        rewards: dict[tuple[int, int], list[float]] = {}
        for experience in exps:
            place = experience.info.get("task_index")
            reward = experience.reward
            if isinstance(place, Mapping) and reward is not None and math.isfinite(reward):
                key = int(place["taskset_id"]), int(place["index"])
                rewards.setdefault(key, []).append(reward)
        found: dict[int, dict[str, list[float]]] = {}
        for (taskset_id, index), values in rewards.items():
            seen = found.setdefault(taskset_id, {"indices": [], "values": []})
            seen["indices"].append(index)
            seen["values"].append(float(np.mean(values)))
        rates = np.array([value for seen in found.values() for value in seen["values"]])
        return exps, {SELECTOR_METRIC: found, **_shares(rates)}


def _shares(rates: np.ndarray) -> Metrics:
    if not len(rates):
        return {}
    above, below = rates > 1 / 16, rates < 15 / 16
    shares = {
        "valid_ratio": (rates > 0) & (rates < 1),
        "strict_valid_ratio": above & below,
        "<1_ratio": rates < 1,
        ">0_ratio": rates > 0,
        "<15_16_ratio": below,
        ">1_16_ratio": above,
    }
    return {f"selection/{name}": float(share.mean()) for name, share in shares.items()}
