"""OPMD and AsymRE: the reward above a baseline, not scaled.

OPMD: arXiv:2509.24203, section 2.2. AsymRE: arXiv:2506.20520, whose baseline lies below the mean.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from trinity.algorithm.advantage_fn.base import (
    AdvantageFn,
    GroupAdvantage,
    GroupResult,
    Metrics,
    group_rewards,
    tiled,
    update_advantage,
)
from trinity.algorithm.advantage_fn.groups import Groups
from trinity.algorithm.advantage_fn.stats import mean
from trinity.common.experience import Experience

Baseline = Literal["mean", "logavgexp"]


def log_mean_exp(rewards: Sequence[float], tau: float) -> float:
    """``tau log mean exp(r / tau)``: the mean for large ``tau``, the maximum for small."""
    top = max(rewards)
    shifted = math.fsum(math.exp((reward - top) / tau) for reward in rewards)
    return top + tau * math.log(shifted / len(rewards))


def _check(baseline: str, tau: float) -> None:
    if baseline not in ("mean", "logavgexp"):
        raise ValueError(f"opmd_baseline is {baseline!r}; choose 'mean' or 'logavgexp'.")
    if tau <= 0:
        raise ValueError(f"tau is {tau}; it must be above 0.")


class BaselineGroupAdvantage(GroupAdvantage):
    """``A = reward - baseline(rewards)``; the baseline of a group of one is 0."""

    def baseline(self, rewards: Sequence[float]) -> float:
        raise NotImplementedError

    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> GroupResult:
        rewards = group_rewards(exps)
        baseline = self.baseline(rewards) if len(exps) > 1 else 0.0
        for experience, reward in zip(exps, rewards, strict=True):
            update_advantage(experience, reward - baseline)
        return exps, {"reward_mean": mean(rewards), "reward_baseline": baseline}


class BaselineAdvantageFn(AdvantageFn):
    """As `BaselineGroupAdvantage`, from the rewards that the trainer has."""

    def baseline(self, groups: Groups) -> Tensor:
        """[G] baseline of each group."""
        raise NotImplementedError

    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Metrics]:
        groups = Groups.of(batch)
        baseline_G = torch.where(groups.size > 1, self.baseline(groups), 0.0)
        advantages, returns = tiled(groups.reward - baseline_G[groups.index], groups.mask)
        return advantages, returns, {}


class OPMDGroupAdvantage(BaselineGroupAdvantage):
    """``A = reward - mean``, or less ``tau log mean exp(reward / tau)``.

    Args:
        opmd_baseline: ``mean`` or ``logavgexp``.
        tau: Temperature of ``logavgexp``.
    """

    def __init__(self, opmd_baseline: Baseline = "mean", tau: float = 1.0) -> None:
        _check(opmd_baseline, tau)
        self.opmd_baseline, self.tau = opmd_baseline, tau

    def baseline(self, rewards: Sequence[float]) -> float:
        return mean(rewards) if self.opmd_baseline == "mean" else log_mean_exp(rewards, self.tau)


class OPMDAdvantageFn(BaselineAdvantageFn):
    """As `opmd`, in the trainer.

    Args:
        opmd_baseline: ``mean`` or ``logavgexp``.
        tau: Temperature of ``logavgexp``.
    """

    def __init__(self, opmd_baseline: Baseline = "mean", tau: float = 1.0) -> None:
        _check(opmd_baseline, tau)
        self.opmd_baseline, self.tau = opmd_baseline, tau

    def baseline(self, groups: Groups) -> Tensor:
        if self.opmd_baseline == "mean":
            return groups.mean()
        return groups.log_mean_exp(self.tau)


class AsymREGroupAdvantage(BaselineGroupAdvantage):
    """``A = reward - (mean + baseline_shift)``.

    Args:
        baseline_shift: Added to the mean; below 0, successes weigh more than failures.
    """

    def __init__(self, baseline_shift: float = -0.1) -> None:
        self.baseline_shift = baseline_shift

    def baseline(self, rewards: Sequence[float]) -> float:
        return mean(rewards) + self.baseline_shift


class AsymREAdvantageFn(BaselineAdvantageFn):
    """As `asymre`, in the trainer.

    Args:
        baseline_shift: Added to the mean; below 0, successes weigh more than failures.
    """

    def __init__(self, baseline_shift: float = -0.1) -> None:
        self.baseline_shift = baseline_shift

    def baseline(self, groups: Groups) -> Tensor:
        return groups.mean() + self.baseline_shift
