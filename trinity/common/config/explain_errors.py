"""pydantic's errors -> `Problem`s in words that help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from trinity.common.config.base import without_none
from trinity.common.config.nearest import nearest
from trinity.common.config.old_names import REMOVED, is_computed
from trinity.common.config.root import Config
from trinity.common.config.verl.keys import VERL_KEYS
from trinity.common.config.verl.launch_table import IMPORTS
from trinity.common.errors import Problem

_TYPE_WORDS = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a section with keys",
    "model_attributes_type": "a section with keys",
    "tuple_type": "a list",
    "sequence_str": "a list",
    "mapping_type": "a mapping of keys to values",
}
_EXAMPLES = {
    "a whole number": "Write digits only, such as `8`.",
    "a number": "Write a number, such as `0.1` or `1e-6`.",
    "true or false": "Write `true` or `false`.",
    "text": "Write text, in quotes if need be.",
    "a list": "Write one item a line, each after `- `.",
    "a mapping of keys to values": "Write keys below it, each as `key: value`.",
    "a section with keys": "Write its keys below it, indented by two spaces.",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


def problems_of(error: ValidationError, data: Any) -> list[Problem]:
    """One problem for each place that ``error`` complains about."""
    by_place: dict[tuple[int | str, ...], Problem] = {}
    for item in error.errors(include_url=False):
        place = _place(item["loc"], data)
        by_place.setdefault(place, _problem(place, item))
    return list(by_place.values())


def _place(location: Sequence[int | str], data: Any) -> tuple[int | str, ...]:
    """``location`` without pydantic's names of union members, which are no keys of the file."""
    place: list[int | str] = []
    node = data
    for index, part in enumerate(location):
        if has(node, part):
            node = node[part]
        elif index < len(location) - 1 or not _is_field(place, part):
            continue
        place.append(part)
    return tuple(place)


def has(node: Any, part: int | str) -> bool:
    """Whether the plain tree ``node`` has ``part`` as key or index."""
    if isinstance(node, list):
        return isinstance(part, int) and part < len(node)
    return isinstance(node, dict) and part in node


def _is_field(place: Sequence[int | str], part: int | str) -> bool:
    model = model_at(place)
    return model is not None and part in model.model_fields


def _problem(place: tuple[int | str, ...], item: Any) -> Problem:
    key = ".".join(map(str, place))
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(key)
    if kind == "too_long" or (kind == "missing" and isinstance(item["loc"][-1], int)):
        return _wrong_count(place, value)
    if kind == "missing":
        return Problem(key, "This key is required here.", f"Add `{place[-1]}: ...`.")
    if kind in ("enum", "literal_error"):
        return _not_a_choice(key, value, str(context.get("expected", "")))
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = context[name]
        fix = f"Set `{place[-1]}` to {words} {bound}."
        return Problem(key, f"This must be {words} {bound}.", fix, value)
    if kind == "string_too_short":
        return Problem(key, "This must not be empty.", f"Give `{place[-1]}` a name.", value)
    if kind == "value_error":  # of our own validators: what is wrong, then what to do
        message, _, fix = str(context["error"]).partition(". ")
        return Problem(key, f"{message}.", fix, value)
    wanted = "a list" if context.get("class") == "Sequence" else _TYPE_WORDS.get(kind)
    if wanted is None:
        return Problem(key, f"{item['msg']}.", "See docs/configuration.md.", value)
    return Problem(key, f"This must be {wanted}.", _EXAMPLES[wanted], value)


def _wrong_count(place: tuple[int | str, ...], value: object) -> Problem:
    """A list of a fixed number of values that has more or fewer; its default shows how many."""
    key, name, model = ".".join(map(str, place)), str(place[-1]), model_at(place[:-1])
    message = "This list has not as many values as it needs."
    if model is None or name not in model.model_fields:  # a value of veRL, judged by itself
        return Problem(key, message, "See docs/configuration.md.", value)
    default = list(model.model_fields[name].default)
    return Problem(key, message, f"Write {len(default)}, such as `{name}: {default}`.", value)


def _not_a_choice(key: str, value: object, expected: str) -> Problem:
    choices = expected.replace("'", "").replace(" or ", ", ").split(", ")
    close = nearest(str(value), choices)
    known = ", ".join(choices)
    fix = f"Did you mean `{close}`? Known: {known}." if close else f"Use one of: {known}."
    return Problem(key, "This is none of the known words.", fix, value)


def unknown_key(key: str) -> Problem:
    """What to say about a key that no section has."""
    parent, _, last = key.rpartition(".")
    plain = _without_stage(key)
    if plain in REMOVED:
        message, fix = REMOVED[plain]
        return Problem(key, message, fix)
    if is_computed(plain):
        message = "This is worked out at start and cannot be set."
        return Problem(key, message, f"Remove `{last}`.")
    if plain in ("actor_rollout_ref", "critic", "reward_model", "data"):
        message = f"`{plain}` is a section of veRL."
        fix = "Move it below `trainer.trainer_config`, or run `trinity import-verl` on the file."
        return Problem(key, message, fix)
    of_verl = _fix_of_verl(plain)
    if of_verl is not None:
        return Problem(key, f"`{plain}` is a key of veRL.", of_verl)
    model = model_at(key.split(".")[:-1])
    known = list(model.model_fields) if model else []
    section = f"`{parent}`" if parent else "the file"
    message = f"There is no key `{last}` in {section}."
    close = nearest(last, known)
    if close:
        return Problem(key, message, f"Did you mean `{close}`?")
    elsewhere = [path for path in all_keys() if path.rpartition(".")[2] == last]
    if elsewhere:
        return Problem(key, message, f"Move it: `{elsewhere[0]}`.")
    return Problem(key, message, f"Remove it. Known there: {', '.join(known)}.")


def _fix_of_verl(key: str) -> str | None:
    """What to do about a key of ``trainer`` or ``algorithm`` that only veRL has; None if not so."""
    found = IMPORTS.get(key)
    if found is not None and found.ours:
        return f"Write `{found.ours}`."
    if found is not None and found.why:
        return f"Remove it: {found.why}."
    if key in VERL_KEYS:
        return f"Move it: `trainer.trainer_config.{key}`."
    return None


def _without_stage(key: str) -> str:
    parts = key.split(".")
    return ".".join(parts[2:]) if parts[0] == "stages" and len(parts) > 2 else key


def model_at(place: Sequence[int | str]) -> type[BaseModel] | None:
    """The section class at ``place``, list indices and names of mappings included."""
    model: type[BaseModel] | None = Config
    inner: Any = Config
    for part in place:
        if model is not None and str(part) in model.model_fields:
            inner = model.model_fields[str(part)].annotation
        elif get_origin(without_none(inner)) in (list, dict):
            inner = get_args(without_none(inner))[-1]
        else:
            return None
        plain = without_none(inner)
        model = plain if isinstance(plain, type) and issubclass(plain, BaseModel) else None
    return model


def all_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key but stages; list items as ``*``, mapping items as ``<name>``."""
    for name, field in model.model_fields.items():
        if not prefix and name == "stages":
            continue
        yield f"{prefix}{name}"
        inner, between = without_none(field.annotation), "."
        if get_origin(inner) is list:
            inner, between = without_none(get_args(inner)[0]), ".*."
        elif get_origin(inner) is dict:
            inner, between = without_none(get_args(inner)[1]), ".<name>."
        if isinstance(inner, type) and issubclass(inner, BaseModel) and not issubclass(inner, Enum):
            yield from all_keys(inner, f"{prefix}{name}{between}")
