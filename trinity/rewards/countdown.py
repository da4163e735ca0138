"""`countdown_reward`: an equation of given numbers that makes a target. Parsed, never run."""

import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from trinity.common.rewards import RewardFn

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)
_MAX_LENGTH = 500
_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class CountdownRewardFn(RewardFn):
    """``score`` 1 for an equation that uses each number once and makes the target,
    ``format_score`` for another equation in answer tags, 0 without one.

    The truth is ``{"target": ..., "numbers": [...]}``, or that as JSON.
    """

    def __init__(self, format_score: float = 0.1, score: float = 1.0) -> None:
        self.format_score, self.full_score = format_score, score

    def __call__(self, response: str, truth: str | Mapping[str, Any]) -> dict[str, float]:
        wanted = json.loads(truth) if isinstance(truth, str) else truth
        answers = _ANSWER.findall(response)
        if not answers:
            return {"score": 0.0}
        is_right = _solves(answers[-1], list(wanted["numbers"]), Fraction(str(wanted["target"])))
        return {"score": self.full_score if is_right else self.format_score}


def _solves(equation: str, numbers: list[int], target: Fraction) -> bool:
    left = equation.strip().split("=")[0].strip()
    try:
        value, used = evaluate(left)
    except ValueError:
        return False
    return value == target and Counter(used) == Counter(map(Fraction, numbers))


def evaluate(expression: str) -> tuple[Fraction, list[Fraction]]:
    """The exact value of an expression of ``+ - * /``, brackets and numbers, and its numbers.

    Raises:
        ValueError: It is something else, too long, or divides by zero.
    """
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"The expression has {len(expression)} characters.")
    used: list[Fraction] = []
    try:
        tree = ast.parse(expression, mode="eval").body
        return _value(tree, used), used
    except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError) as error:
        raise ValueError(f"{expression!r} is no expression: {error}") from error


def _value(node: ast.expr, used: list[Fraction]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        number = Fraction(str(node.value))
        used.append(number)
        return number
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    raise ValueError(f"{type(node).__name__} is not allowed in an expression.")
