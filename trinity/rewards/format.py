"""`format_reward`: the response thinks and answers in tags."""

import re

from trinity.common.rewards import RewardFn

_THINK_ANSWER = re.compile(
    r"\s*<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.S
)


def is_think_answer(response: str) -> bool:
    """Whether the response is one ``<think>`` block, then one ``<answer>`` block, nothing else."""
    match = _THINK_ANSWER.fullmatch(response)
    return match is not None and response.count("<think>") == response.count("<answer>") == 1


class FormatRewardFn(RewardFn):
    """``coef`` if the response has the form, ``-coef`` if not."""

    def __init__(self, coef: float = 0.1) -> None:
        self.coef = coef

    def __call__(self, response: str) -> dict[str, float]:
        return {"format_score": self.coef if is_think_answer(response) else -self.coef}
