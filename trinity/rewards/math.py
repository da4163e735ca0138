"""`math_reward` and `math_boxed_reward`: is the answer right, and is it where it should be?"""

import re

from trinity.common.rewards import RewardFn
from trinity.rewards.equality import final_answer, is_equal, load_algebra, quick_verdict
from trinity.rewards.format import is_think_answer

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)


class MathRewardFn(RewardFn):
    """``accuracy`` 1 or 0 for the text in ``<answer>`` (of all the response, without such a tag),
    and ``format_score`` of plus or minus ``format_score_coef``.
    """

    is_isolated = True

    def __init__(self, format_score_coef: float = 0.1) -> None:
        self.format_score_coef = format_score_coef

    def prepare(self) -> None:
        load_algebra()

    def quick(self, response: str, truth: object) -> dict[str, float] | None:
        verdict = quick_verdict(_answer_in(response), final_answer(truth))
        return None if verdict is None else self._parts(response, verdict)

    def __call__(self, response: str, truth: object) -> dict[str, float]:
        return self._parts(response, is_equal(_answer_in(response), truth))

    def _parts(self, response: str, is_right: bool) -> dict[str, float]:
        sign = 1 if is_think_answer(response) else -1
        return {"accuracy": float(is_right), "format_score": sign * self.format_score_coef}


class MathBoxedRewardFn(RewardFn):
    r"""``accuracy`` 1 or 0 for what the last ``\boxed{}`` holds, and ``format_score``.

    Args:
        with_think: The response is to think in ``<think>`` tags first.
        format_score_coef: Taken off if the box, or the wanted tags, are missing.
    """

    is_isolated = True

    def __init__(self, with_think: bool = False, format_score_coef: float = 0.1) -> None:
        self.with_think = with_think
        self.format_score_coef = format_score_coef

    def prepare(self) -> None:
        load_algebra()

    def quick(self, response: str, truth: object) -> dict[str, float] | None:
        boxed = last_boxed(response)
        verdict = False if boxed is None else quick_verdict(boxed, final_answer(truth))
        return None if verdict is None else self._parts(response, boxed, verdict)

    def __call__(self, response: str, truth: object) -> dict[str, float]:
        boxed = last_boxed(response)
        return self._parts(response, boxed, boxed is not None and is_equal(boxed, truth))

    def _parts(self, response: str, boxed: str | None, is_right: bool) -> dict[str, float]:
        has_tags = "<think>" in response and "</think>" in response
        is_formed = boxed is not None and (has_tags or not self.with_think)
        return {
            "accuracy": float(is_right),
            "format_score": 0.0 if is_formed else -self.format_score_coef,
        }


class MathEvalRewardFn(MathBoxedRewardFn):
    r"""``accuracy`` 1 or 0 for the last ``\boxed{}``; nothing for the form."""

    def __init__(self) -> None:
        super().__init__()

    def _parts(self, response: str, boxed: str | None, is_right: bool) -> dict[str, float]:
        return {"accuracy": float(is_right)}


def last_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{...}``, braces inside it balanced; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place].strip()
    return None


def _answer_in(response: str) -> str:
    answers = _ANSWER.findall(response)
    return answers[-1] if answers else response
