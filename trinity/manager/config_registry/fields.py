"""Settings made from the fields of the configuration's models: label, help, kind and default."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from itertools import groupby
from typing import Any, Literal, get_args, get_origin

import streamlit as st
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trinity.common.config.base import options_of, without_none
from trinity.manager.config_registry.config_registry import CONFIG_GENERATORS

KEYS: dict[str, str] = {}
"""Setting -> its dotted key in a file."""

_INITIAL: dict[str, object] = {}
_FREE_TEXT: set[str] = set()
_ACRONYMS = frozenset(("api", "gpu", "hf", "kl", "lr"))


def add_fields(
    section: str,
    model: type[BaseModel],
    names: Iterable[str],
    prefix: str = "",
    choices: Mapping[str, list[str]] | None = None,
) -> None:
    """Register a setting ``<prefix><name>`` for each of the named fields of a section.

    Args:
        section: Dotted key of the section; "" for the top of the file.
        choices: Field -> the names it may have, for fields whose type does not tell.
    """
    for name in names:
        field = model.model_fields[name]
        setting = f"{prefix}{name}"
        KEYS[setting] = f"{section}.{name}" if section else name
        default = _shown(field)
        _INITIAL[setting] = default
        draw = _drawer(setting, field, KEYS[setting], (choices or {}).get(name))
        CONFIG_GENERATORS.register_config(default_value=default)(draw)


def changed(state: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The values below ``section`` that are not the defaults, as a tree; "": keys of no section."""
    tree: dict[str, Any] = {}
    for setting, key in KEYS.items():
        head, _, inner = key.partition(".")
        if (head if inner else "") != section or not CONFIG_GENERATORS.is_visible(setting):
            continue
        value = state.get(setting, _INITIAL[setting])
        if value != _INITIAL[setting]:
            is_yaml = isinstance(value, str) and setting not in _FREE_TEXT
            put(tree, inner or key, yaml.safe_load(value) if is_yaml else value)
    return tree


def put(tree: dict[str, Any], key: str, value: object) -> None:
    """Set a dotted key of ``tree``, which is changed."""
    *parents, last = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


def _shown(field: FieldInfo) -> object:
    """The default as a widget shows it: nothing for "unset"."""
    default = field.get_default(call_default_factory=True)
    kind = _kind(field)
    if isinstance(default, Enum):
        return str(default.value)
    if default is None or default in ([], {}):
        return ""
    if kind in (bool, int) or isinstance(default, str):
        return default
    return yaml.safe_dump(default, default_flow_style=True).removesuffix("...\n").strip()


def _kind(field: FieldInfo) -> object:
    """bool, int, str; a list of choices; None for what is written as YAML."""
    annotation = field.annotation
    if annotation in (bool, int, str):
        return annotation
    main = without_none(annotation)
    unset = [""] if len(options_of(annotation)) > 1 else []
    if isinstance(main, type) and issubclass(main, Enum):
        return [*unset, *(str(choice.value) for choice in main)]
    if get_origin(main) is Literal:
        return [*unset, *map(str, get_args(main))]
    return str if main is str else None


def _label(setting: str) -> str:
    said = [word for word, _ in groupby(setting.split("_"))]  # no "trainer trainer type"
    words = [word.upper() if word in _ACRONYMS else word for word in said]
    return " ".join([words[0][0].upper() + words[0][1:], *words[1:]])


def _drawer(
    setting: str, field: FieldInfo, key_in_file: str, choices: list[str] | None
) -> Callable[..., object]:
    kind = ["", *choices] if choices else _kind(field)
    if kind is str or isinstance(kind, list):
        _FREE_TEXT.add(setting)
    label = _label(setting)
    text = f"`{key_in_file}`: {' '.join((field.description or '').split())}"
    least = next((rule.ge for rule in field.metadata if hasattr(rule, "ge")), None)

    def draw(key: str) -> None:
        if kind is bool:
            st.checkbox(label, key=key, help=text)
        elif kind is int:
            st.number_input(label, key=key, help=text, step=1, min_value=least)
        elif isinstance(kind, list):
            st.selectbox(label, kind, key=key, help=text)
        else:
            st.text_input(label, key=key, help=text)

    draw.__name__ = f"set_{setting}"
    return draw
