"""What a reward is, and how it is called: `RewardFn`, `REWARD_FUNCTIONS`, `Scorer`."""

from trinity.common.rewards.base import REWARD_FUNCTIONS, RewardFn, RewardFunction
from trinity.common.rewards.scoring import RewardError, RewardPolicy, Scorer, make_scorer

__all__ = [
    "REWARD_FUNCTIONS",
    "RewardError",
    "RewardFn",
    "RewardFunction",
    "RewardPolicy",
    "Scorer",
    "make_scorer",
]
