"""The reward of `cpu_grpo.py`: nearly all samples differ in it, so every row is trained on."""

from trinity.common.rewards import REWARD_FUNCTIONS, RewardFn


@REWARD_FUNCTIONS.register_module("distinct_words")
class DistinctWords(RewardFn):
    """Share of the words of a response that are different."""

    def __call__(self, response: str) -> dict[str, float]:
        words = response.split()
        return {"distinct": len(set(words)) / max(1, len(words))}
