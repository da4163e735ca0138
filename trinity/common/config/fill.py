"""Filling in what a user left open, with a note for each value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trinity.common.config.root import Config


@dataclass(frozen=True)
class Derived:
    """One value that was worked out: where it went, what it is, and why.

    ``is_copy`` tells values that merely stand elsewhere in the file too.
    """

    key: str
    value: object
    why: str
    is_copy: bool = False

    def __str__(self) -> str:
        return f"{self.key} = {self.value} ({self.why})"


class Filler:
    """A copy of a configuration, and the notes on what was put into it."""

    def __init__(self, config: Config) -> None:
        self.config = config.model_copy(deep=True)
        self.notes: list[Derived] = []

    def put(self, key: str, value: object, why: str, is_copy: bool = False) -> None:
        """Set ``key``; a value that stands there already makes no note."""
        holder, name = self._holder(key)
        if getattr(holder, name) == value:
            return
        setattr(holder, name, value)
        self.notes.append(Derived(key, getattr(holder, name), why, is_copy))

    def default(self, key: str, value: object, why: str) -> None:
        """Set ``key`` if it is open: None, empty text or 0. None as ``value`` leaves it open."""
        holder, name = self._holder(key)
        if value is not None and getattr(holder, name) in (None, "", 0):
            self.put(key, value, why)

    def copy(self, key: str, source: str) -> None:
        """Set ``key``, if it is open, to what stands at ``source``."""
        holder, name = self._holder(key)
        value = value_at(self.config, source.split("."))
        if value not in (None, "") and getattr(holder, name) in (None, ""):
            self.put(key, value, f"as {source}", is_copy=True)

    def lend(self, key: str, source: str) -> None:
        """As `copy`, and ``key`` goes on counting as left out: who reads it may know better."""
        was_set = self.is_set(key)
        self.copy(key, source)
        if not was_set:
            holder, name = self._holder(key)
            holder.model_fields_set.discard(name)

    def is_set(self, key: str) -> bool:
        """Whether the file gives ``key`` a value of its own."""
        return is_set(self.config, key)

    def _holder(self, key: str) -> tuple[Any, str]:
        *path, name = key.split(".")
        return value_at(self.config, path), name


def value_at(config: Any, path: list[str]) -> Any:
    """What stands at ``path``, list indices and names of mappings included."""
    node = config
    for part in path:
        if isinstance(node, list):
            node = node[int(part)]
        elif isinstance(node, dict):
            node = node[part]
        else:
            node = getattr(node, part)
    return node


def is_set(config: Config, key: str) -> bool:
    """Whether ``key`` was given, in a file or in Python, rather than left at its default."""
    node: Any = config
    for part in key.split("."):
        if isinstance(node, list):
            if int(part) >= len(node):
                return False
            node = node[int(part)]
        elif isinstance(node, dict):
            if part not in node:
                return False
            node = node[part]
        else:
            if node is None or part not in node.model_fields_set:
                return False
            node = getattr(node, part)
    return True
