"""Values of rows: texts, dialogues and tools, read in the forms data sets have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trinity.buffer.rows import Row, lookup
from trinity.buffer.rows.check import RowFault

if TYPE_CHECKING:
    from trinity.common.experience import Messages


def value_of(row: Row, key: str) -> object:
    """The value at ``key``; `RowFault` if it is missing or null."""
    try:
        value = lookup(row, key)
    except KeyError:
        raise RowFault(key, f"missing; the row has {', '.join(row) or 'nothing'}") from None
    if value is None:
        raise RowFault(key, "null")
    return value


def optional_value(row: Row, key: str | None) -> object:
    """The value at ``key``; None if it is missing, null, or there is no key."""
    try:
        return lookup(row, key) if key else None
    except KeyError:
        return None


def text_of(row: Row, key: str) -> str:
    """The text at ``key``, which must not be blank."""
    value = value_of(row, key)
    if not isinstance(value, str):
        raise RowFault(key, f"of type {type(value).__name__}, not text")
    if not value.strip():
        raise RowFault(key, "empty")
    return value


def messages_of(row: Row, key: str) -> Messages:
    """The messages at ``key``: a list, or the same as JSON text. Cleaned, see `clean_message`."""
    value = _parsed(value_of(row, key), key)
    if not isinstance(value, list) or not value:
        raise RowFault(key, "not a list of messages" if value != [] else "empty")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowFault(key, "a message without a role")
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if isinstance(part, dict) and part.get("type", "text") != "text":
                reason = f"a part of type {part['type']!r}; dialogues of data sets are text"
                raise RowFault(key, reason)
    return [clean_message(message) for message in value]


def tools_of(row: Row, key: str) -> Messages | None:
    """The tools at ``key``: a list of objects, or the same as JSON text; None without any."""
    value = optional_value(row, key)
    if value is None or value == "":
        return None
    value = _parsed(value, key)
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowFault(key, "not a list of objects")
    return [_without_nulls(tool) for tool in value] or None  # type: ignore[misc]  # objects


def clean_message(message: Mapping[str, object]) -> dict[str, object]:
    """A message without what tables add to it, and with an object as content as JSON text.

    Tables give every row the fields of all rows, null where a row has none.
    """
    cleaned = {key: value for key, value in message.items() if value is not None}
    content = cleaned.get("content", "")
    is_parts = isinstance(content, list) and all(
        isinstance(part, dict) and "type" in part for part in content
    )
    if not isinstance(content, str) and not is_parts:
        content = json.dumps(content, ensure_ascii=False)
    cleaned["content"] = content
    if "tool_calls" in cleaned:
        cleaned["tool_calls"] = _without_nulls(cleaned["tool_calls"])
    return cleaned


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _parsed(value: object, key: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowFault(key, f"a text that is not JSON ({error})") from None


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading items two sequences share."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
