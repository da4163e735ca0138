"""GRPO: rewards normalised within the group (arXiv:2402.03300, section 4.1.2)."""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Literal

from trinity.algorithm.advantage_fn.base import (
    GroupAdvantage,
    GroupResult,
    group_rewards,
    is_live,
    update_advantage,
)
from trinity.algorithm.advantage_fn.stats import mean, place, ranks, std, stream_of
from trinity.algorithm.utils import masked_mean
from trinity.common.experience import EID, Experience


class GRPOGroupAdvantage(GroupAdvantage):
    """``A = (reward - mean) / (std + epsilon)`` with the group's mean and unbiased std.

    A group of one has mean 0 and std 1, so its advantage is its reward.

    Args:
        epsilon: Added to the std.
        std_threshold: Drop groups of one, and those whose std is at most this; None drops none.
        duplicate_experiences: Fill the places of dropped groups with copies of kept experiences,
            so that the batch keeps its size.
        rank_penalty: Rank the group by mean log-probability (likeliest last) and take mean and std
            over ``reward * (1 - rank / G * rank_penalty)``. The numerator keeps the raw reward, so
            this shifts a group as a whole; the unlikeliness reward of arXiv:2506.02355 would also
            replace it there.
        std_cal_level: ``group``, or ``batch`` for the std over all rewards of the batch.
    """

    def __init__(
        self,
        epsilon: float = 1e-6,
        std_threshold: float | None = None,
        duplicate_experiences: bool = False,
        rank_penalty: float | None = None,
        std_cal_level: Literal["group", "batch"] = "group",
    ) -> None:
        check_std_level(std_cal_level)
        self.epsilon = epsilon
        self.std_threshold = std_threshold
        self.duplicate_experiences = duplicate_experiences
        self.rank_penalty = rank_penalty
        self.std_cal_level = std_cal_level

    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> GroupResult:
        return self._calculate(group_id, exps, batch_std=None)

    def process(self, exps: Sequence[Experience]) -> GroupResult:
        batch_std = None
        if self.std_cal_level == "batch":
            batch_std = std(group_rewards([e for e in exps if is_live(e)]))
        kept, metrics = self._process_groups(exps, partial(self._calculate, batch_std=batch_std))
        if self.duplicate_experiences:
            kept = kept + copies_of(kept, len(exps) - len(kept))
        return kept, metrics

    def _calculate(
        self, group_id: str, exps: list[Experience], batch_std: float | None
    ) -> GroupResult:
        rewards = group_rewards(exps)
        penalized = self._penalized(exps, rewards)
        is_single = len(exps) == 1
        group_mean = 0.0 if is_single else mean(penalized)
        group_std = 1.0 if is_single else std(penalized)
        metrics = {"reward_mean": group_mean, "reward_std": group_std}
        if self.std_threshold is not None and (is_single or group_std <= self.std_threshold):
            return [], metrics
        scale = group_std if batch_std is None or is_single else batch_std
        for experience, reward in zip(exps, rewards, strict=True):
            update_advantage(experience, (reward - group_mean) / (scale + self.epsilon))
        return exps, metrics

    def _penalized(self, exps: list[Experience], rewards: list[float]) -> list[float]:
        if self.rank_penalty is None:
            return rewards
        likelihoods = [_mean_logprob(experience) for experience in exps]
        shares = [rank / len(exps) for rank in ranks(likelihoods)]
        return [r * (1 - s * self.rank_penalty) for r, s in zip(rewards, shares, strict=True)]


def check_std_level(level: str) -> None:
    """Refuse a ``std_cal_level`` that does not exist."""
    if level not in ("group", "batch"):
        raise ValueError(f"std_cal_level is {level!r}; choose 'group' or 'batch'.")


def copies_of(exps: Sequence[Experience], count: int) -> list[Experience]:
    """``count`` deep copies drawn from the trained ones among ``exps``, with ids of their own.

    Which ones depends on the experiences there are, not on their order.
    """
    source = sorted((e for e in exps if is_live(e)), key=lambda e: (place(e.eid), e.eid.suffix))
    if not source:
        return []
    drawn = stream_of([e.eid for e in source]).choices(source, k=count)
    copies = [deepcopy(experience) for experience in drawn]
    for number, copy in enumerate(copies):
        copy.eid = EID(**{**copy.eid.to_dict(), "suffix": f"{copy.eid.suffix}-{number}"})  # type: ignore[arg-type]  # the fields of an EID
    return copies


def _mean_logprob(experience: Experience) -> float:
    if experience.logprobs is None or experience.action_mask is None:
        raise ValueError(f"rank_penalty needs logprobs, and {experience.eid.uid} has none.")
    return float(masked_mean(experience.logprobs, experience.action_mask))
