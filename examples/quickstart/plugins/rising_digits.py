"""The quickstart's reward: four different digits of the question, in rising order."""

from itertools import pairwise

from trinity.common.rewards import REWARD_FUNCTIONS, RewardFn

PICKED = 4


@REWARD_FUNCTIONS.register_module("rising_digits")
class RisingDigits(RewardFn):
    """1 if the response is right, else 0. The truth that comes with a task is one right answer."""

    def __call__(self, response: str, prompt: str) -> dict[str, float]:
        is_rising = all(left < right for left, right in pairwise(response))
        is_right = len(response) == PICKED and is_rising and set(response) <= set(prompt)
        return {"accuracy": float(is_right)}
