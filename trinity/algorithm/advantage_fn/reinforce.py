"""REINFORCE without a baseline."""

from trinity.algorithm.advantage_fn.base import (
    GroupAdvantage,
    GroupResult,
    group_rewards,
    update_advantage,
)
from trinity.algorithm.advantage_fn.stats import mean
from trinity.common.experience import Experience


class ReinforceGroupAdvantage(GroupAdvantage):
    """``A = reward``."""

    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> GroupResult:
        rewards = group_rewards(exps)
        for experience, reward in zip(exps, rewards, strict=True):
            update_advantage(experience, reward)
        return exps, {"reward_mean": mean(rewards)}
