"""`tool_call_reward`: the tools called are the right ones, with the right arguments."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trinity.common.rewards import RewardFn

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)
_THOUGHT = re.compile(r"^\s*<think>.*?</think>", re.S)
_MAX_LENGTH = 20_000

Call = tuple[str, str]


class ToolCallRewardFn(RewardFn):
    """``accuracy`` 1 if the calls are those of the truth, in any order, else 0, and
    ``format_score`` of ``-format_score_coef`` if the response can't be read.

    Calls may be written as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as a
    JSON list of such objects, or as ToolACE does: ``[func(x=1), other(y="a")]``. A truth without
    calls is a response without any.
    """

    def __init__(self, format_score_coef: float = 0.1) -> None:
        self.format_score_coef = format_score_coef

    def __call__(self, response: str, truth: object) -> dict[str, float]:
        wanted = parse_calls(truth) if isinstance(truth, str) else _calls(truth)
        if wanted is None:
            wanted = []
        given = parse_calls(_THOUGHT.sub("", response))
        is_right = given is not None and sorted(given) == sorted(wanted)
        return {
            "accuracy": float(is_right),
            "format_score": -self.format_score_coef if given is None else 0.0,
        }


def parse_calls(text: str) -> list[Call] | None:
    """The calls in a text as (name, arguments as JSON with sorted keys); None if unreadable.

    A text without anything like a call has no calls.
    """
    text = text.strip()[:_MAX_LENGTH]
    try:
        if tagged := _TAGGED.findall(text):
            return [call for one in tagged for call in _calls(json.loads(one))]
        if text.startswith("[") and (calls := _python_calls(text)) is not None:
            return calls
        if text.startswith(("[", "{")):
            return _calls(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return None if "<tool_call>" in text else []


def _calls(value: object) -> list[Call]:
    if isinstance(value, str):
        value = json.loads(value)
    items = value if isinstance(value, Sequence) else [value]
    return [_call(item) for item in items if item]


def _call(item: object) -> Call:
    if not isinstance(item, Mapping):
        raise TypeError(f"{item!r} is no call.")
    function: Mapping[str, Any] = item.get("function") or item
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return str(function["name"]), json.dumps(arguments or {}, sort_keys=True)


def _python_calls(text: str) -> list[Call] | None:
    """``[name(a=1), ...]`` by Python's grammar; values are literals, nothing is run."""
    try:
        tree = ast.parse(_plain_names(text), mode="eval").body
    except (SyntaxError, MemoryError):
        return None
    if not isinstance(tree, ast.List) or not all(isinstance(e, ast.Call) for e in tree.elts):
        return None
    calls = []
    for element in tree.elts:
        assert isinstance(element, ast.Call)
        if element.args or any(keyword.arg is None for keyword in element.keywords):
            raise ValueError("Arguments are given by name.")
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in element.keywords}
        name = _restored(ast.unparse(element.func))
        calls.append((name, json.dumps(arguments, sort_keys=True)))
    return calls


_NAME = re.compile(r"(?<=[\[,])\s*([A-Za-z_][\w .\-/]*?)\s*\(")


def _plain_names(text: str) -> str:
    """ToolACE has names with spaces, dots and dashes: ``[Get Weather(city="Oslo")]``."""
    return _NAME.sub(lambda match: f"{_escaped(match[1])}(", text)


def _escaped(name: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else f"__x{ord(c):02x}__" for c in name)


def _restored(name: str) -> str:
    return re.sub(r"__x([0-9a-f]{2})__", lambda match: chr(int(match[1], 16)), name)
