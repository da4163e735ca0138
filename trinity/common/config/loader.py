"""A YAML file and command-line overrides -> `Config`, or every problem at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from trinity.common.config.explain_errors import has, problems_of
from trinity.common.config.interpolate import resolve
from trinity.common.config.old_names import modernise
from trinity.common.config.plain_values import clean
from trinity.common.config.root import Config, Source
from trinity.common.config.source import Tree, parse_value, read_tree
from trinity.common.errors import ARGUMENT, ConfigError, Problem


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file.

    Args:
        path: The YAML file. `${a.b}` and `${oc.env:VAR,default}` are resolved.
        overrides: ``a.b.c=value`` each, the value in YAML; applied before references resolve.

    Raises:
        ConfigError: With all that is wrong in names, types and references. What contradicts
            what is for `find_problems`.
    """
    config, problems = read_config(path, overrides)
    if config is None or problems:
        raise ConfigError(problems, str(path))
    return config


def read_config(
    path: str | Path, overrides: Sequence[str] = ()
) -> tuple[Config | None, list[Problem]]:
    """Like `load_config`, with whatever could be read: bad keys are left at their defaults.

    The configuration is None where even that makes no sense.
    """
    try:
        tree = read_tree(path)
    except ConfigError as error:
        return None, error.problems
    problems = list(tree.problems)
    for override in overrides:
        problems += apply_override(tree, override)
    config, more = build_config(tree, str(path))
    return config, problems + more


def build_config(tree: Tree, path: str = "") -> tuple[Config | None, list[Problem]]:
    """The configuration in ``tree``, and what is wrong with it."""
    data, problems = resolve(tree.data)
    renamed = modernise(clean(data, Config))
    problems += renamed.problems
    moved = {new: tree.lines.get(old) for new, old in renamed.moved.items()}
    lines = {key: line for key, line in (tree.lines | moved).items() if line is not None}
    source = Source(path, lines, ())
    config, more = _validate(renamed.data)
    if config is not None:
        config._source = replace(source, warnings=tuple(dict.fromkeys(renamed.warnings)))
    first = {problem.key: problem for problem in reversed(problems + more)}
    kept = [problem for problem in problems + more if problem is first[problem.key]]
    return config, [_locate(problem, source, renamed.moved) for problem in kept]


def apply_override(tree: Tree, override: str) -> list[Problem]:
    """Set one ``a.b.c=value`` in ``tree``; problems if it is not of that form."""
    key, equals, text = override.partition("=")
    key = re.sub(r"\[(\d+)\]", r".\1", key.strip().lstrip("-"))
    if not equals or not key:
        fix = "Write overrides as `buffer.batch_size=8`."
        return [Problem(override, "This argument is not of the form `key=value`.", fix)]
    try:
        value = parse_value(text) if text.strip() else ""
    except yaml.YAMLError as error:
        return [Problem(key, f"The value is not YAML: {error}", "Quote it.", text)]
    problems = _set(tree.data, key, key.split("."), value)
    if not problems:
        below = [known for known in tree.lines if known.startswith(f"{key}.")]
        for known in below:
            del tree.lines[known]
        tree.lines[key] = ARGUMENT
    return problems


def _set(node: Any, key: str, parts: list[str], value: Any) -> list[Problem]:
    head, rest = parts[0], parts[1:]
    if isinstance(node, list):
        if not head.isdigit() or int(head) >= len(node):
            message = f"The list holds {len(node)} items; {head!r} is none of them."
            return [Problem(key, message, "Count from 0.", value)]
        index: Any = int(head)
    elif isinstance(node, dict):
        index = head
    else:
        message = f"{head!r} stands below a value, not a section."
        return [Problem(key, message, "Leave out the last part of the key.", value)]
    if not rest:
        node[index] = value
        return []
    if isinstance(node, dict) and node.get(index) is None:
        node[index] = {}
    return _set(node[index], key, rest, value)


def _validate(data: dict[str, Any]) -> tuple[Config | None, list[Problem]]:
    """The configuration without its bad keys, and what is wrong with those."""
    problems: list[Problem] = []
    for _ in range(5):
        try:
            return Config.model_validate(data), problems
        except ValidationError as error:
            problems += problems_of(error, data)
            for item in error.errors():
                _drop(data, item["loc"])
    return None, problems


def _drop(data: Any, location: Sequence[int | str]) -> None:
    """Remove what stands at ``location``, or the nearest thing around it that exists."""
    node: Any = data
    path: list[tuple[Any, Any]] = []
    for part in location:
        if has(node, part):
            path.append((node, part))
            node = node[part]
    if not path:
        return
    holder, part = path[-1]
    if isinstance(holder, list) and isinstance(holder[part], dict):
        holder[part] = {}
    else:
        del holder[part]


def _locate(problem: Problem, source: Source, moved: dict[str, str]) -> Problem:
    key = problem.key
    for new, old in moved.items():
        if key == new or key.startswith(f"{new}."):
            key = old + key[len(new) :]
    return replace(problem, key=key, line=problem.line or source.line(problem.key))
