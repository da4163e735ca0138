"""A tree of values with a comment on each -> YAML text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import yaml


@dataclass
class CommentedTree:
    """Values by dotted key, in the order they were set. List items count from 0."""

    root: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: Any, comment: str = "") -> None:
        """Put ``value`` at ``key``; a second value there replaces the first."""
        *path, last = key.split(".")
        node: Any = self.root
        for part in path:
            if isinstance(node, list):
                while len(node) <= int(part):
                    node.append({})
                node = node[int(part)]
            else:
                node = node.setdefault(part, {})
        node[last] = value
        if comment:
            self.comments[key] = comment

    def text(self) -> str:
        """The tree as YAML, each commented line with its comment."""
        return "\n".join(self._lines(self.root, "", "")) + "\n"

    def _lines(self, node: dict[str, Any], prefix: str, indent: str) -> list[str]:
        lines: list[str] = []
        for name, value in node.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and value:
                lines.append(self._with_comment(f"{indent}{name}:", key))
                lines += self._lines(value, f"{key}.", f"{indent}  ")
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                lines.append(self._with_comment(f"{indent}{name}:", key))
                for index, item in enumerate(value):
                    inner = self._lines(item, f"{key}.{index}.", f"{indent}    ")
                    inner[0] = f"{indent}  - {inner[0].lstrip()}"
                    lines += inner
            else:
                lines.append(self._with_comment(f"{indent}{name}: {_scalar(value)}", key))
        return lines

    def _with_comment(self, line: str, key: str) -> str:
        comment = self.comments.get(key)
        return f"{line}  # {comment}" if comment else line


def _scalar(value: Any) -> str:
    is_number = isinstance(value, float) and math.isfinite(value) and value != 0
    if is_number and not 1e-3 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{Decimal(repr(value)):e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}"
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("...\n").strip()
