"""`math_reward` and `math_boxed_reward`: is the answer right, and is it where it should be?"""

import re

from trinity.common.rewards import RewardFn
from trinity.rewards.equality import is_equal
from trinity.rewards.format import is_think_answer

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)


class MathRewardFn(RewardFn):
    """``accuracy`` 1 or 0 for the text in ``<answer>`` (or all of it, if there is no such tag),
    and ``format_score`` of plus or minus ``format_score_coef``."""

    is_isolated = True

    def __init__(self, format_score_coef: float = 0.1) -> None:
        self.format_score_coef = format_score_coef

    def __call__(self, response: str, truth: str) -> dict[str, float]:
        answers = _ANSWER.findall(response)
        is_right = is_equal(answers[-1] if answers else response, truth)
        sign = 1 if is_think_answer(response) else -1
        return {"accuracy": float(is_right), "format_score": sign * self.format_score_coef}
