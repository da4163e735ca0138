"""Operators that leave experiences out. What they leave out is counted."""

import math
from collections.abc import Iterable

import numpy as np

from trinity.buffer.operators.base import ExperienceOperator, Processed
from trinity.common.experience import Experience, group_by
from trinity.utils.metrics import summarize


class RewardFilter(ExperienceOperator):
    """Keeps experiences with a reward of at least ``threshold``; those without one are left out."""

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def process(self, exps: list[Experience]) -> Processed:
        kept = [e for e in exps if e.reward is not None and e.reward >= self.threshold]
        return kept, {"filtered_count": len(exps) - len(kept)}


class InvalidRewardFilter(ExperienceOperator):
    """Keeps experiences whose reward is a finite number."""

    def process(self, exps: list[Experience]) -> Processed:
        kept = [e for e in exps if e.reward is not None and math.isfinite(e.reward)]
        return kept, {"filtered_count": len(exps) - len(kept)}


class RewardSTDFilter(ExperienceOperator):
    """Keeps groups (by task) whose rewards have a population deviation above ``threshold``."""

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def process(self, exps: list[Experience]) -> Processed:
        kept: list[Experience] = []
        found = []
        for group in group_by(exps, "task").values():
            rewards = _rewards(group)
            deviation = float(np.std(rewards)) if rewards else 0.0
            mean = float(np.mean(rewards)) if rewards else math.nan
            found.append({"reward_mean": mean, "reward_std": deviation})
            if len(group) > 1 and deviation > self.threshold:
                kept += group
        metrics = summarize(found, "origin_group_advantages")
        return _in_order(exps, kept), metrics | {"operator_filtered_count": len(exps) - len(kept)}


class DapoDynamicSampling(ExperienceOperator):
    """Keeps groups (by task) that are partly right: of all right, all wrong, or one, nothing
    can be learned (arXiv:2503.14476, section 3.2).

    Args:
        metric_key: Metric that says how right an experience is; without it the reward says so.
        correct_threshold: An experience is right above this.
    """

    def __init__(self, metric_key: str = "accuracy", correct_threshold: float = 0.0) -> None:
        self.metric_key = metric_key
        self.correct_threshold = correct_threshold

    def process(self, exps: list[Experience]) -> Processed:
        kept: list[Experience] = []
        right = wrong = 0
        for group in group_by(exps, "task").values():
            scores = [score for e in group if (score := self._score(e)) is not None]
            num_correct = sum(score > self.correct_threshold for score in scores)
            if 0 < num_correct < len(scores):
                kept += group
            elif scores and num_correct == len(scores):
                right += 1
            elif scores:
                wrong += 1
        return _in_order(exps, kept), {
            "filtered_count": len(exps) - len(kept),
            "dropped_all_correct": right,
            "dropped_all_wrong": wrong,
        }

    def _score(self, experience: Experience) -> float | None:
        """None for one without a score: it is not wrong, and says nothing of its group."""
        score = experience.metrics.get(self.metric_key, experience.reward)
        return score if score is not None and math.isfinite(score) else None


def _rewards(group: Iterable[Experience]) -> list[float]:
    return [e.reward for e in group if e.reward is not None and math.isfinite(e.reward)]


def _in_order(exps: list[Experience], kept: list[Experience]) -> list[Experience]:
    chosen = set(map(id, kept))
    return [e for e in exps if id(e) in chosen]
