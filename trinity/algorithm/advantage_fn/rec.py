"""REC: rewards above the mean, with surplus failures dropped if asked (arXiv:2509.24203)."""

from typing import Literal

from trinity.algorithm.advantage_fn.base import (
    GroupAdvantage,
    GroupResult,
    group_rewards,
    update_advantage,
)
from trinity.algorithm.advantage_fn.stats import mean, place, std, stream_of
from trinity.common.experience import Experience


class RECGroupAdvantage(GroupAdvantage):
    """``A = r - mean``, or ``(r - mean) / (std + epsilon)``, over the kept samples of the group.

    Mean and (biased) std of a group of one are 0 and 1.

    Args:
        epsilon: Added to the std.
        std_normalize: Divide by the std.
        drop: ``balance`` drops failures (``r`` below the group's mean) at random until there are no
            more of them than successes: their advantage is 0, and they don't count in mean and std.
    """

    def __init__(
        self,
        epsilon: float = 1e-6,
        std_normalize: bool = False,
        drop: Literal["balance"] | None = None,
    ) -> None:
        if drop not in (None, "balance"):
            raise ValueError(f"drop is {drop!r}; choose 'balance', or leave it out.")
        self.epsilon, self.std_normalize, self.drop = epsilon, std_normalize, drop

    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> GroupResult:
        rewards = group_rewards(exps)
        is_kept = self._kept(exps, rewards)
        kept = [reward for reward, keep in zip(rewards, is_kept, strict=True) if keep]
        center, scale = (mean(kept), std(kept, unbiased=False)) if len(exps) > 1 else (0.0, 1.0)
        divisor = scale + self.epsilon if self.std_normalize else 1.0
        for experience, reward, keep in zip(exps, rewards, is_kept, strict=True):
            update_advantage(experience, (reward - center) / divisor if keep else 0.0)
        return exps, {
            "reward_mean": center,
            "reward_std": scale,
            "dropped": float(len(exps) - len(kept)),
        }

    def _kept(self, exps: list[Experience], rewards: list[float]) -> list[bool]:
        center = mean(rewards)
        failures = [index for index, reward in enumerate(rewards) if reward < center]
        surplus = len(failures) - (len(rewards) - len(failures))
        if self.drop is None or surplus <= 0:
            return [True] * len(exps)
        failures.sort(key=lambda index: (place(exps[index].eid), exps[index].eid.suffix))
        dropped = set(stream_of([e.eid for e in exps]).sample(failures, surplus))
        return [index not in dropped for index in range(len(exps))]
