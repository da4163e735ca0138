"""`accuracy_reward`: the answer, found by a parser of yours, is the right one."""

from collections.abc import Callable
from importlib import import_module

from trinity.common.rewards import RewardFn
from trinity.rewards.equality import final_answer, is_equal, load_algebra, quick_verdict

Parser = Callable[[str], str]


class AccuracyRewardFn(RewardFn):
    """``accuracy`` 1 if the parsed response equals the truth, as text or as mathematics, else 0.

    Args:
        answer_parser: Finds the answer in a response: a function, or the dotted path of one.
            None: the response is the answer.
    """

    is_isolated = True

    def __init__(self, answer_parser: Parser | str | None = None) -> None:
        self.answer_parser = _load(answer_parser) if isinstance(answer_parser, str) else None
        if callable(answer_parser):
            self.answer_parser = answer_parser

    def prepare(self) -> None:
        load_algebra()

    def quick(self, response: str, truth: object) -> dict[str, float] | None:
        if self.answer_parser is not None:
            return None
        verdict = quick_verdict(response, final_answer(truth))
        return None if verdict is None else {"accuracy": float(verdict)}

    def __call__(self, response: str, truth: object) -> dict[str, float]:
        answer = self.answer_parser(response) if self.answer_parser else response
        return {"accuracy": float(is_equal(answer, truth))}


def _load(path: str) -> Parser:
    module, _, name = path.rpartition(".")
    parser: Parser = getattr(import_module(module), name)
    return parser
