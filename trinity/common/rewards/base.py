"""`RewardFn`, the base of rewards, and `REWARD_FUNCTIONS`, their names."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from trinity.utils.registry import Registry

RewardParts = Mapping[str, float] | float
RewardFunction = Callable[..., RewardParts | Awaitable[RewardParts]]


class RewardFn(ABC):
    """Scores one response.

    ``__init__`` takes the settings (`reward_fn_args` of the taskset). ``__call__`` names what it
    wants to see and gets exactly that: ``response``, ``truth``, ``prompt``, ``messages``,
    ``tokens``, ``truncation``, ``task``, ``metadata`` (see `docs/write_a_reward.md`); with
    ``**kwargs`` it gets all. It returns named parts, whose sum is the reward, or one number; it
    may be async.

    Set ``is_isolated`` if a call may hang in a way that a thread can't be rid of: it then runs
    in a process of its own, which is killed at the deadline. `quick` spares most responses that
    way.
    """

    is_isolated: bool = False

    def __init__(self, **kwargs: object) -> None:
        if kwargs:
            raise TypeError(
                f"{type(self).__name__} takes no arguments, but got {', '.join(sorted(kwargs))}."
            )

    def prepare(self) -> None:  # noqa: B027  # optional
        """Import what calls need, in their own process (``is_isolated``), off their time."""

    def quick(self, *args: Any, **kwargs: Any) -> Any:
        """The same as a call where that takes no time and can't hang; None: make the call."""
        return None

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Named parts of the reward, e.g. ``{"accuracy": 1.0, "format": 0.1}``."""


#: Names of rewards. An entry is a `RewardFn` class, or a plain function with the same arguments.
REWARD_FUNCTIONS: Registry[type[RewardFn] | RewardFunction] = Registry(
    "reward function",
    {
        "math_reward": "trinity.rewards.math.MathRewardFn",
        "math_boxed_reward": "trinity.rewards.math.MathBoxedRewardFn",
        "accuracy_reward": "trinity.rewards.accuracy.AccuracyRewardFn",
        "format_reward": "trinity.rewards.format.FormatRewardFn",
        "countdown_reward": "trinity.rewards.countdown.CountdownRewardFn",
        "math_dapo_reward": "trinity.rewards.dapo.MathDAPORewardFn",
        "tool_call_reward": "trinity.rewards.tool_call.ToolCallRewardFn",
        "exact_match_reward": "trinity.rewards.exact_match.ExactMatchRewardFn",
        "sudoku_reward": "trinity.rewards.sudoku.SudokuRewardFn",
        "math_boxed_reward_naive_dapo": "trinity.rewards.dapo.MathDAPORewardFn",
        "toolcall_reward": "trinity.rewards.tool_call.ToolCallRewardFn",
        "reasoning_gym_reward": "trinity.rewards.reasoning_gym.ReasoningGymRewardFn",
        "combined_reward": "trinity.rewards.combined.CombinedRewardFn",
    },
)
