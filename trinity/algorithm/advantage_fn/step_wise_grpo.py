"""GRPO over runs of several experiences: each step has the advantage of its whole run."""

from collections.abc import Sequence
from typing import Literal

from trinity.algorithm.advantage_fn.base import (
    GroupAdvantage,
    GroupResult,
    is_live,
    reward_of,
    update_advantage,
)
from trinity.algorithm.advantage_fn.grpo import check_std_level
from trinity.algorithm.advantage_fn.stats import mean, std
from trinity.common.experience import Experience, group_by


def runs_of(exps: Sequence[Experience]) -> list[list[Experience]]:
    """The experiences run by run, each in order of ``eid.step``."""
    return [sorted(run, key=lambda e: e.eid.step) for run in group_by(exps, "run").values()]


class StepWiseGRPOGroupAdvantage(GroupAdvantage):
    """``(R - mean) / (std + epsilon)`` over the runs of a task, given to every step of the run.

    R is the reward of the run's last step, by ``eid.step``. A run counts if any of its steps is
    trained on; a single run has mean 0 and std 1.

    Args:
        epsilon: Added to the std.
        enable_step_norm: Divide a run's advantage by the number of its steps.
        std_threshold: Drop tasks of one run, and those whose std is at most this; None drops none.
        std_cal_level: ``group``, or ``batch`` for the std over all runs of the batch.
    """

    def __init__(
        self,
        epsilon: float = 1e-6,
        enable_step_norm: bool = False,
        std_threshold: float | None = None,
        std_cal_level: Literal["group", "batch"] = "group",
    ) -> None:
        check_std_level(std_cal_level)
        self.epsilon = epsilon
        self.enable_step_norm = enable_step_norm
        self.std_threshold = std_threshold
        self.std_cal_level = std_cal_level

    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> GroupResult:
        return self._calculate(exps, batch_std=None)

    def process(self, exps: Sequence[Experience]) -> GroupResult:
        tasks = list(self.group_experiences(exps).values())
        live_runs = [run for run in runs_of(exps) if any(map(is_live, run))]
        is_batch = self.std_cal_level == "batch"
        batch_std = std([run_reward(run) for run in live_runs]) if is_batch else None
        results = [self._calculate(task, batch_std) for task in tasks]
        kept = {id(experience) for task, _ in results for experience in task}
        remaining = [experience for experience in exps if id(experience) in kept]
        skipped = sum(not task for task, _ in results)
        metrics = self.summarize([metrics for _, metrics in results])
        metrics["experience_count"] = float(len(remaining))
        metrics["filtered_count"] = float(len(exps) - len(remaining))
        metrics["skipped_group_ratio"] = skipped / len(tasks) if tasks else 0.0
        return remaining, metrics

    def _calculate(self, exps: list[Experience], batch_std: float | None) -> GroupResult:
        runs = runs_of(exps)
        live_runs = [run for run in runs if any(map(is_live, run))]
        for experience in exps:
            update_advantage(experience, 0.0)
        if not live_runs:
            return exps, {}
        rewards = [run_reward(run) for run in live_runs]
        is_single = len(live_runs) == 1
        center, spread = (0.0, 1.0) if is_single else (mean(rewards), std(rewards))
        metrics = {"reward_mean": center, "reward_std": spread}
        if self.std_threshold is not None and (is_single or spread <= self.std_threshold):
            return [], metrics
        scale = spread if batch_std is None or is_single else batch_std
        for run, reward in zip(live_runs, rewards, strict=True):
            advantage = (reward - center) / (scale + self.epsilon)
            for experience in run:
                share = len(run) if self.enable_step_norm else 1
                update_advantage(experience, advantage / share)
        return exps, metrics


def run_reward(run: Sequence[Experience]) -> float:
    """Reward of a run in step order: that of its last step."""
    return reward_of(run[-1])
