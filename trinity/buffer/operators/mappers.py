"""Operators that change experiences."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trinity.buffer.operators.base import ExperienceOperator, Processed
from trinity.buffer.rows import lookup
from trinity.common.constants import OpType
from trinity.common.experience import Experience
from trinity.utils.metrics import summarize

_OPERATIONS: dict[OpType, Callable[[float, float], float]] = {
    OpType.ADD: lambda reward, value: reward + value,
    OpType.SUB: lambda reward, value: reward - value,
    OpType.MUL: lambda reward, value: reward * value,
    OpType.DIV: lambda reward, value: reward / value,
}


class MaskResponseTruncated(ExperienceOperator):
    """Trains on no token of a response that was cut off at the length limit."""

    def process(self, exps: list[Experience]) -> Processed:
        cut = [e for e in exps if e.truncate_status == "response_truncated"]
        for experience in cut:
            experience.action_mask = torch.zeros(experience.response_length, dtype=torch.bool)
        return exps, {"masked_count": len(cut)}


class RewardShapingMapper(ExperienceOperator):
    """Adds statistics of an experience to its reward, or multiplies it with them.

    Args:
        reward_shaping_configs: Steps, in order: ``stats_key`` (dotted, in `info`), ``op_type``
            (ADD, SUB, MUL or DIV) and ``weight``: ``reward <- reward op (weight * statistic)``.
    """

    def __init__(self, reward_shaping_configs: Sequence[Mapping[str, Any]] = ()) -> None:
        self.steps = [
            (
                str(step["stats_key"]),
                OpType(step.get("op_type", "ADD")),
                float(step.get("weight", 1)),
            )
            for step in reward_shaping_configs
        ]

    def process(self, exps: list[Experience]) -> Processed:
        changes = []
        for experience in exps:
            if experience.reward is None:
                continue
            shaped = self._shaped(experience, experience.reward)
            changes.append({"reward_diff": shaped - experience.reward})
            experience.reward = shaped
        return exps, summarize(changes)

    def _shaped(self, experience: Experience, reward: float) -> float:
        for key, operation, weight in self.steps:
            try:
                value = lookup(experience.info, key)
            except KeyError:
                known = ", ".join(map(str, experience.info)) or "nothing"
                raise ValueError(
                    f"reward_shaping_mapper: {key!r} is not in the info of {experience.eid.uid}; "
                    f"it has {known}. An earlier operator must put it there."
                ) from None
            try:
                reward = _OPERATIONS[operation](reward, weight * float(value))  # type: ignore[arg-type]  # else a TypeError
            except (TypeError, ValueError, ZeroDivisionError) as error:
                raise ValueError(
                    f"reward_shaping_mapper: {key!r} of {experience.eid.uid} is {value!r}, which "
                    f"can't shape a reward ({operation.value}): it must be a number, and no 0 to "
                    "divide by. Leave such experiences out before, or take another statistic."
                ) from error
        return reward
