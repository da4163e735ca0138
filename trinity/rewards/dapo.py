"""`math_dapo_reward`: plus or minus 1, and a penalty for length (DAPO, arXiv:2503.14476)."""

import re

from trinity.common.rewards import RewardFn
from trinity.rewards.equality import final_answer, is_equal, load_algebra, quick_verdict
from trinity.rewards.math import last_boxed

_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_TAIL = 300  # an answer stands at the end; characters before are not searched


class MathDAPORewardFn(RewardFn):
    r"""``accuracy`` 1 or -1 for the last ``Answer: ...`` or ``\boxed{}``, and ``format_score``,
    the soft penalty for overlong responses (eq. 13).

    The penalty is 0 up to ``max_response_length - cache_length`` tokens, falls to
    ``-penalty_factor`` over the next ``cache_length``, and stays there.
    """

    is_isolated = True

    def __init__(
        self,
        enable_overlong_penalty: bool = False,
        penalty_factor: float = 1.0,
        max_response_length: int | None = None,
        cache_length: int | None = None,
    ) -> None:
        if enable_overlong_penalty and not (max_response_length and cache_length):
            raise TypeError(
                "enable_overlong_penalty needs max_response_length and cache_length, in tokens"
            )
        self.enable_overlong_penalty = enable_overlong_penalty
        self.penalty_factor = penalty_factor
        self.max_response_length = max_response_length or 0
        self.cache_length = cache_length or 0

    def prepare(self) -> None:
        load_algebra()

    def quick(self, response: str, truth: object, response_token: object) -> object:
        answer = _answer_in(response)
        verdict = False if answer is None else quick_verdict(answer, final_answer(truth))
        return None if verdict is None else self._parts(verdict, response_token)

    def __call__(self, response: str, truth: object, response_token: object) -> dict[str, float]:
        answer = _answer_in(response)
        return self._parts(answer is not None and is_equal(answer, truth), response_token)

    def _parts(self, is_right: bool, response_token: object) -> dict[str, float]:
        num_tokens = len(response_token)  # type: ignore[arg-type]  # a tensor or list
        penalty = self._penalty(num_tokens) if self.enable_overlong_penalty else 0.0
        return {"accuracy": 1.0 if is_right else -1.0, "format_score": penalty}

    def _penalty(self, num_tokens: int) -> float:
        over = num_tokens - (self.max_response_length - self.cache_length)
        return -self.penalty_factor * min(max(over / self.cache_length, 0.0), 1.0)


def _answer_in(response: str) -> str | None:
    boxed = last_boxed(response)
    lines = _ANSWER_LINE.findall(response[-_TAIL:])
    return lines[-1].strip() if lines else boxed
