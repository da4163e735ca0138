"""`exact_match_reward`: the response is the right answer, to the letter."""

from trinity.common.rewards import RewardFn


class ExactMatchRewardFn(RewardFn):
    """1 if the response equals the truth (or one of several), white space around it aside."""

    def __call__(self, response: str, truth: object) -> dict[str, float]:
        rights = truth if isinstance(truth, (list, tuple)) else [truth]
        is_right = any(response.strip() == str(right).strip() for right in rights)
        return {"accuracy": float(is_right)}
