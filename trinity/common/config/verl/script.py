"""A shell script that launches veRL -> its `key=value` arguments, variables filled in."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_ARGUMENT = re.compile(r"\+{0,2}~?([\w./@-]+)=(.*)", re.DOTALL)
_ENTRY = re.compile(r"\bmain_\w+|verl\.trainer\.\w+")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class Script:
    """What a script tells: arguments in order, variables, and what could not be read."""

    arguments: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def read_script(text: str) -> Script:
    """The arguments of the veRL command in ``text``.

    Variables set in the script are filled in; others, such as ``$HOME``, become
    ``${oc.env:HOME}``. Single quotes keep a ``$``, as in a shell.
    """
    script = Script()
    for command in _commands(text):
        words = list(_words(command, script))
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            script.variables[match[1]] = match[2]
            words.pop(0)
        if words and words[0] == "export":
            for word in words[1:]:
                if match := _ASSIGNMENT.fullmatch(word):
                    script.variables[match[1]] = match[2]
        elif any(_ENTRY.search(word) for word in words[:6]):
            _take_arguments(words, script)
    return script


def _take_arguments(words: list[str], script: Script) -> None:
    start = next(index for index, word in enumerate(words) if _ENTRY.search(word))
    for word in words[start + 1 :]:
        match = _ARGUMENT.fullmatch(word)
        if match:
            script.arguments[match[1]] = match[2]
        elif word:
            script.unread.append(word)


def _commands(text: str) -> Iterator[str]:
    """Lines with their continuations, without comments."""
    joined = re.sub(r"\\[ \t]*\r?\n", " ", text)
    for line in joined.splitlines():
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield stripped


def _words(command: str, script: Script) -> Iterator[str]:
    """The words of one command, quotes taken off and variables filled in."""
    word, quote, started, i = "", "", False, 0
    while i < len(command):
        char = command[i]
        if quote == "'":
            word, quote = (word, "") if char == "'" else (word + char, quote)
        elif char == "\\" and i + 1 < len(command):
            word, started, i = word + command[i + 1], True, i + 1
        elif char == "$":
            value, i = _expand(command, i, script)
            word, started = word + value, started or bool(value)
            continue
        elif char == '"':
            quote, started = ("" if quote else '"'), True
        elif char == "'" and not quote:
            quote, started = "'", True
        elif not quote and (char.isspace() or char in ";&|"):
            if started:
                yield word
            word, started = "", False
            if char in ";&|":
                return
        elif not quote and char == "#" and not started:
            break
        else:
            word, started = word + char, True
        i += 1
    if started:
        yield word


def _expand(command: str, start: int, script: Script) -> tuple[str, int]:
    """The value of the ``$...`` at ``start``, and where the text goes on."""
    rest = command[start + 1 :]
    if rest.startswith(("(", "{")):
        end = _behind_bracket(command, start + 1)
        inner = command[start + 1 : end]
        if inner.startswith("((") and inner.endswith("))"):
            return _arithmetic(inner[2:-2], script), end
        if inner.startswith("{") and inner.endswith("}"):
            name, _, default = inner[1:-1].partition(":-")
            return _variable(name, default, script), end
        script.unread.append(f"${inner}")
        return f"${inner}", end
    match = _NAME.match(rest)
    if match:
        return _variable(match[0], "", script), start + 1 + match.end()
    return "", start + 2


def _behind_bracket(command: str, start: int) -> int:
    """The place behind the one that closes the bracket at ``start``, or the end without one."""
    opening = command[start]
    closing = {"(": ")", "{": "}"}[opening]
    depth = 0
    for place in range(start, len(command)):
        depth += (command[place] == opening) - (command[place] == closing)
        if depth == 0:
            return place + 1
    return len(command)


def _variable(name: str, default: str, script: Script) -> str:
    if name in script.variables:
        return script.variables[name]
    if not _NAME.fullmatch(name):
        return default
    if default:
        inner = list(_words(f'"{default}"', script))
        return f"${{oc.env:{name},{inner[0] if inner else default}}}"
    return f"${{oc.env:{name}}}"


def _arithmetic(text: str, script: Script) -> str:
    filled = re.sub(
        r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: script.variables.get(match[1], "0"), text
    )
    try:
        return str(_number(ast.parse(filled.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        script.unread.append(f"$(({text}))")
        return ""


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_number(node.left), _number(node.right)))
    raise ValueError(f"{ast.dump(node)} is no arithmetic")
