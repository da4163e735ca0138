"""What YAML reads as text and means otherwise: the word `None`, and numbers such as `1e-6`."""

from __future__ import annotations

import re
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from trinity.common.config.base import options_of

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_NULLS = frozenset(("None", "null", "Null", "NULL", "~"))


def clean(value: Any, annotation: Any = Any) -> Any:
    """``value`` with the text `None` read as null and `1e-6` as a number, at every depth.

    Args:
        annotation: What the value is declared as; text stays text where text is wanted.
    """
    if isinstance(value, dict):
        return {str(key): clean(item, _inside(annotation, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item, _inside(annotation, 0)) for item in value]
    if not isinstance(value, str):
        return value
    if value in _NULLS:
        return None
    is_number = _NUMBER.fullmatch(value.strip()) and str not in options_of(annotation)
    return float(value) if is_number else value


def _inside(annotation: Any, key: object) -> Any:
    """What the item ``key`` of a value declared as ``annotation`` is declared as."""
    for option in options_of(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            field = option.model_fields.get(str(key))
            return field.annotation if field else Any
        if get_origin(option) in (list, dict):
            return get_args(option)[-1]
    return Any
