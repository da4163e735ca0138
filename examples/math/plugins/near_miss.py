"""Stands for a reward model: what is near the right number is worth something.

A real one is asked over HTTP in the same place (docs/write_a_reward.md, "Async rewards").
"""

import re

from trinity.common.rewards import REWARD_FUNCTIONS


@REWARD_FUNCTIONS.register_module("near_miss")
async def near_miss(response, messages, ground_truth):
    numbers = [int(text) for text in re.findall(r"\d{1,6}", response)]
    gap = min((abs(number - int(ground_truth)) for number in numbers), default=99)
    return {"near_miss": 1 / (1 + gap)}
