"""Split a reply's text into reasoning, content and calls of tools, by the form a model writes."""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trinity.common.models.messages import well_formed
from trinity.utils.registry import Registry


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for; ``arguments`` is JSON text, as OpenAI has it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedReply:
    """A reply in its parts. ``content`` is what is left for the reader."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


ToolParser = Callable[[str], ParsedReply]
ReasoningParser = Callable[[str], ParsedReply]

TOOL_PARSERS: Registry[ToolParser] = Registry("tool call parser")
"""``tool_call_parser`` -> function from a reply's text to its parts.

A reply in which nothing can be parsed is all content."""

REASONING_PARSERS: Registry[ReasoningParser] = Registry("reasoning parser")
"""``reasoning_parser`` -> function from a reply's text to reasoning and content."""


def parse_reply(text: str, tool_parser: str | None, reasoning_parser: str | None) -> ParsedReply:
    """A reply in its parts; without parsers all of it is content."""
    parsed = ParsedReply(text)
    if reasoning_parser:
        parsed = REASONING_PARSERS.get(reasoning_parser)(text)
    if tool_parser:
        calls = TOOL_PARSERS.get(tool_parser)(parsed.content)
        parsed = replace(parsed, content=calls.content, tool_calls=calls.tool_calls)
    return parsed


@TOOL_PARSERS.register_module("hermes")
def parse_hermes(text: str) -> ParsedReply:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen2.5, Qwen3)."""
    blocks = re.findall(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", text, re.DOTALL)
    calls = [call for block in blocks for call in _json_calls(block)]
    if not calls or len(calls) < len(blocks):
        return ParsedReply(text)
    return ParsedReply(text[: text.index("<tool_call>")].strip(), tool_calls=tuple(calls))


@TOOL_PARSERS.register_module("llama3_json")
def parse_llama3_json(text: str) -> ParsedReply:
    """A reply that is ``{"name": ..., "parameters": {...}}``, or several joined by ``;``."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return ParsedReply(text)
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder()
    while body:
        try:
            value, end = decoder.raw_decode(body)
        except ValueError:
            return ParsedReply(text)
        call = _call(value)
        if call is None:
            return ParsedReply(text)
        calls.append(call)
        body = body[end:].lstrip("; \n")
    return ParsedReply("", tool_calls=tuple(calls))


@TOOL_PARSERS.register_module("mistral")
def parse_mistral(text: str) -> ParsedReply:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``."""
    before, mark, after = text.partition("[TOOL_CALLS]")
    calls = _json_calls(after.strip()) if mark else []
    if not calls:
        return ParsedReply(text)
    return ParsedReply(before.strip(), tool_calls=tuple(calls))


@TOOL_PARSERS.register_module("pythonic")
def parse_pythonic(text: str) -> ParsedReply:
    """``[name(key=value), ...]`` with values that are Python literals (Llama 3.2 and 4)."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else []
        calls = tuple(_python_call(node) for node in nodes)
    except (SyntaxError, ValueError):
        return ParsedReply(text)
    return ParsedReply("", tool_calls=calls) if calls else ParsedReply(text)


@TOOL_PARSERS.register_module("qwen3_coder")
def parse_qwen3_coder(text: str) -> ParsedReply:
    """``<function=name><parameter=key>value</parameter></function>`` in ``<tool_call>``."""
    calls = []
    for name, body in re.findall(r"<function=([^>\s]+)>(.*?)</function>", text, re.DOTALL):
        found = re.findall(r"<parameter=([^>\s]+)>(.*?)</parameter>", body, re.DOTALL)
        arguments = {key: _literal(value.strip("\n")) for key, value in found}
        calls.append(_tool_call(name, arguments))
    if not calls:
        return ParsedReply(text)
    start = min(place for mark in ("<tool_call>", "<function=") if (place := text.find(mark)) >= 0)
    return ParsedReply(text[:start].strip(), tool_calls=tuple(calls))


@REASONING_PARSERS.register_module("deepseek_r1")
def parse_think(text: str) -> ParsedReply:
    """Reasoning up to ``</think>``; the opening mark may be part of the prompt."""
    before, mark, after = text.partition("</think>")
    opened = before.lstrip().startswith("<think>")
    reasoning = before.lstrip().removeprefix("<think>").strip()
    if mark:
        return ParsedReply(after.lstrip("\n"), reasoning=reasoning or None)
    return ParsedReply("", reasoning=reasoning) if opened else ParsedReply(text)


for _name in ("qwen3", "think", "glm45"):
    REASONING_PARSERS.register_module(_name)(parse_think)


def _json_calls(text: str) -> list[ToolCall]:
    try:
        value = json.loads(text)
    except ValueError:
        return []
    calls = [_call(item) for item in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if all(calls) else []


def _call(value: object) -> ToolCall | None:
    """A call out of the object that a model wrote; None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return _tool_call(value["name"], value.get("arguments", value.get("parameters", {})))


def _tool_call(name: str, arguments: object) -> ToolCall:
    is_text = isinstance(arguments, str)
    text = str(arguments) if is_text else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(well_formed(name), well_formed(text))


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call by keywords")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("not a call by keywords")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return _tool_call(ast.unparse(node.func), arguments)


def _literal(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
