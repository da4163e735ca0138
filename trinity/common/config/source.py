"""The YAML text of a file -> a plain tree with a line for every key. No values are judged here."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trinity.common.errors import ConfigError, Problem


@dataclass
class Tree:
    """A parsed file: plain dicts and lists, the line of each dotted key, what is wrong."""

    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_tree(path: str | Path) -> Tree:
    """Parse a YAML file.

    Raises:
        ConfigError: The file cannot be read, or is not YAML at all. Duplicate keys do not end
            the reading; they are in the tree's ``problems``.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([_unreadable(path, error)], str(path)) from error
    return parse_tree(text, str(path))


def parse_tree(text: str, path: str = "") -> Tree:
    """Like `read_tree`, from text."""
    try:
        loader = _Loader(_BACKTICKS.sub(r"\1'\2'", text))
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        raise ConfigError([_syntax_problem(text, error)], path) from error
    tree = Tree()
    if node is None:
        return tree
    if not isinstance(node, yaml.MappingNode):
        problem = Problem("", "The file is not a mapping of keys to values.", _MAPPING_FIX, line=1)
        raise ConfigError([problem], path)
    if loop := _loop(node, ()):
        message = "The alias stands inside what it is an alias of."
        problem = Problem("", message, "Write the values out.", line=loop.start_mark.line + 1)
        raise ConfigError([problem], path)
    for key, line, is_duplicate in _walk(node, ""):
        if is_duplicate:
            first = tree.lines[key]
            tree.problems.append(
                Problem(key, f"The key stands twice, first in line {first}.", _TWICE_FIX, line=line)
            )
        else:
            tree.lines[key] = line
    tree.data = loader.construct_document(node)
    return tree


def parse_value(text: str) -> Any:
    """A value alone, read as it would be in a file; `yaml.YAMLError` if it is none."""
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is not None and _loop(node, ()) is not None:
        raise yaml.YAMLError("the alias stands inside what it is an alias of")
    return None if node is None else loader.construct_document(node)


_BACKTICKS = re.compile(r"^(\s*[\w.]+:\s+)`([^`'\n]*)`", re.MULTILINE)
_MAPPING_FIX = "Start with a key, such as `mode: both`."
_TWICE_FIX = "Remove one of the two, or merge what is below them."


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but `1e-6` is a number and dates stay text."""

    yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _walk(node: yaml.Node, prefix: str) -> Iterator[tuple[str, int, bool]]:
    """Dotted key, line and whether it is a repetition, of everything below ``node``."""
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            yield f"{prefix}{index}", child.start_mark.line + 1, False
            yield from _walk(child, f"{prefix}{index}.")
    elif isinstance(node, yaml.MappingNode):
        seen: set[Hashable] = set()
        for name, child in node.value:
            key = f"{prefix}{name.value}"
            yield key, name.start_mark.line + 1, name.value in seen and name.value != "<<"
            seen.add(name.value)
            yield from _walk(child, f"{key}.")


def _loop(node: yaml.Node, above: tuple[yaml.Node, ...]) -> yaml.Node | None:
    """A node that stands inside itself, by an alias."""
    if any(node is outer for outer in above):
        return node
    if isinstance(node, yaml.ScalarNode):
        return None
    is_mapping = isinstance(node, yaml.MappingNode)
    children = [value for _, value in node.value] if is_mapping else node.value
    found = (_loop(child, (*above, node)) for child in children)
    return next((loop for loop in found if loop is not None), None)


def _unreadable(path: str | Path, error: Exception) -> Problem:
    if isinstance(error, FileNotFoundError):
        return Problem("", f"There is no file {str(path)!r}.", "Check the path after --config.")
    if isinstance(error, IsADirectoryError):
        return Problem("", f"{str(path)!r} is a folder.", "Name the YAML file inside it.")
    if isinstance(error, UnicodeDecodeError):
        return Problem("", f"{str(path)!r} is not UTF-8 text.", "Save the file as UTF-8.")
    return Problem("", f"{str(path)!r} cannot be read: {error}.", "Check its permissions.")


def _syntax_problem(text: str, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return Problem("", f"This is not YAML: {error}", "Check the file for stray characters.")
    number = mark.line + 1
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    said = getattr(error, "problem", None) or "cannot be read"
    start = getattr(error, "context_mark", None)
    since = f", in what began in line {start.line + 1}" if start else ""
    return Problem(
        line.split(":")[0].strip(" \t-#'\""),
        f"This is not YAML: {said} (column {mark.column + 1}{since}).",
        _syntax_fix(line, said),
        value=line.strip() or None,
        line=number,
    )


def _syntax_fix(line: str, said: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    if "\t" in indent or "'\\t'" in said:
        return "Indent with spaces; YAML allows no tabs there."
    if "mapping values are not allowed" in said:
        return "Put quotes around a value that holds ': ', and align keys of one section."
    if "'`'" in said or "'@'" in said or "'%'" in said:
        return "Put the value in quotes."
    if "expected <block end>" in said:
        return "Align this key with the others of its section, using spaces."
    return "Close open quotes and brackets, and align keys of one section."
