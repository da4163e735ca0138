"""Which names a file may use, read off the source text of registries and plugins.

Nothing is imported: a check must neither load torch nor run a user's code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

Names = Mapping[str, frozenset[str]]
"""Registry -> the names in it."""

_PACKAGE = Path(__file__).parents[2]
_HOMES = {
    "ALGORITHM_TYPE": "algorithm/algorithm_type.py",
    "ADVANTAGE_FN": "algorithm/advantage_fn/__init__.py",
    "POLICY_LOSS_FN": "algorithm/policy_loss_fn/__init__.py",
    "KL_FN": "algorithm/kl_fn/__init__.py",
    "ENTROPY_LOSS_FN": "algorithm/entropy_loss_fn/__init__.py",
    "SAMPLE_STRATEGY": "algorithm/sample_strategy/__init__.py",
    "WORKFLOWS": "common/workflows/names.py",
    "REWARD_FUNCTIONS": "common/rewards/base.py",
    "SELECTORS": "buffer/selector/__init__.py",
    "EXPERIENCE_OPERATORS": "buffer/operators/__init__.py",
    "MONITOR": "utils/monitor.py",
}
"""Registry -> file below `trinity/` that holds its table."""

KINDS = {
    "ALGORITHM_TYPE": "algorithm type",
    "ADVANTAGE_FN": "advantage function",
    "POLICY_LOSS_FN": "policy loss",
    "KL_FN": "KL function",
    "ENTROPY_LOSS_FN": "entropy loss",
    "SAMPLE_STRATEGY": "sample strategy",
    "WORKFLOWS": "workflow",
    "REWARD_FUNCTIONS": "reward function",
    "SELECTORS": "data selector",
    "EXPERIENCE_OPERATORS": "experience operator",
    "MONITOR": "monitor",
}
"""Registry -> what one entry is called in a message."""


@cache
def builtin_names() -> Names:
    """The names that ship with trinity."""
    return {registry: _table_keys(registry, _PACKAGE / home) for registry, home in _HOMES.items()}


def known_names(plugin_dirs: Iterable[str | Path] = ()) -> Names:
    """The names that ship with trinity, and those that files in ``plugin_dirs`` register."""
    names = {registry: set(entries) for registry, entries in builtin_names().items()}
    for folder in plugin_dirs:
        for path in sorted(Path(folder).expanduser().rglob("*.py")):
            for registry, name in _registered(path):
                names.setdefault(registry, set()).add(name)
    return {registry: frozenset(entries) for registry, entries in names.items()}


def _table_keys(registry: str, path: Path) -> frozenset[str]:
    """Keys of the dict in ``REGISTRY = Registry("kind", {...})``."""
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.AnnAssign):
            targets: list[ast.expr] = [node.target]
        elif isinstance(node, ast.Assign):
            targets = node.targets
        else:
            continue
        if any(isinstance(item, ast.Name) and item.id == registry for item in targets):
            tables = [item for item in ast.walk(node) if isinstance(item, ast.Dict)]
            return frozenset(_text_keys(tables[0])) if tables else frozenset()
    return frozenset()


def _text_keys(table: ast.Dict) -> Iterator[str]:
    for key in table.keys:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def _registered(path: Path) -> Iterator[tuple[str, str]]:
    """(registry, name) of each ``REGISTRY.register_module("name")`` in a file."""
    for node in ast.walk(_parse(path)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        registry = node.func.value
        name = node.args[0] if node.args else None
        is_named = isinstance(name, ast.Constant) and isinstance(name.value, str)
        if node.func.attr == "register_module" and isinstance(registry, ast.Name) and is_named:
            assert isinstance(name, ast.Constant)
            yield registry.id, str(name.value)


def _parse(path: Path) -> ast.Module:
    """The syntax tree of a file; empty for one that is missing or no Python."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ast.Module(body=[], type_ignores=[])
