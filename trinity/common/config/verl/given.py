"""The text of a veRL launch (script or YAML) -> veRL's keys with their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from trinity.common.config.interpolate import resolve
from trinity.common.config.plain_values import clean
from trinity.common.config.verl.script import read_script


def read_launch(text: str) -> tuple[dict[str, Any], list[str]]:
    """veRL's dotted keys and their values, and what could not be read; none of another text."""
    script = read_script(text)
    if script.arguments:
        return {key: clean(_value(word)) for key, word in script.arguments.items()}, script.unread
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}, []
    if not isinstance(tree, dict) or not ({"actor_rollout_ref", "data", "trainer"} & set(tree)):
        return {}, []
    tree.pop("defaults", None)
    resolved, problems = resolve(tree)
    flat: dict[str, Any] = {}
    _flatten("", clean(resolved), flat)
    return flat, [f"{problem.key}: {problem.message}" for problem in problems]


def _flatten(prefix: str, node: Mapping[str, Any], flat: dict[str, Any]) -> None:
    for name, value in node.items():
        if isinstance(value, dict) and value:
            _flatten(f"{prefix}{name}.", value, flat)
        elif not (isinstance(value, dict)):
            flat[f"{prefix}{name}"] = value


def _value(word: str) -> Any:
    if word.startswith("${"):
        return word
    try:
        return yaml.safe_load(_protect(word))
    except yaml.YAMLError:
        return word


def _protect(word: str) -> str:
    """``${oc.env:A}`` inside a YAML list would be read as a mapping; quote bare ones."""
    if "${" in word and word.startswith("[") and "'" not in word and '"' not in word:
        return re.sub(r"([^\[\],\s]*\$\{[^}]*\}[^\[\],\s]*)", r"'\1'", word)
    return f"'{word}'" if "${" in word and not word.startswith("[") else word
