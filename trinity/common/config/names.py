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

PACKAGE = Path(__file__).parents[2]
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
    "EXPERIENCE_OPERATORS": "buffer/operators/base.py",
    "FORMATTER": "buffer/schema/__init__.py",
    "PRIORITY_FUNC": "buffer/storage/priority.py",
    "READER": "buffer/reader/__init__.py",
    "WRITER": "buffer/writer/__init__.py",
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
    "FORMATTER": "formatter",
    "PRIORITY_FUNC": "priority function",
    "READER": "buffer reader",
    "WRITER": "buffer writer",
    "MONITOR": "monitor",
}
"""Registry -> what one entry is called in a message."""


@cache
def builtin_names() -> Names:
    """The names that ship with trinity."""
    return {registry: frozenset(table_of(registry)) for registry in _HOMES}


@cache
def table_of(registry: str) -> Mapping[str, str]:
    """Name -> dotted path of what ships with trinity; "" where the path is not written out."""
    home = PACKAGE / _HOMES[registry]
    module = ".".join(home.relative_to(PACKAGE.parent).with_suffix("").parts)
    values = {"__name__": ast.Constant(module), **dict(_assignments(parse(home)))}
    call = values.get(registry)
    if not isinstance(call, ast.Call):
        return {}
    entries = (entry for argument in call.args for entry in _entries(argument, values))
    return {name: _text(path, values) for name, path in entries}


def known_names(plugin_dirs: Iterable[str | Path] = ()) -> Names:
    """The names that ship with trinity, and those that files in ``plugin_dirs`` register."""
    names = {registry: set(entries) for registry, entries in builtin_names().items()}
    for folder in plugin_dirs:
        for path in sorted(Path(folder).expanduser().rglob("*.py")):
            for registry, name in _registered(path):
                names.setdefault(registry, set()).add(name)
    return {registry: frozenset(entries) for registry, entries in names.items()}


def _assignments(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in module.body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets: list[ast.expr] = [node.target]
            value = node.value
        elif isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        else:
            continue
        yield from ((item.id, value) for item in targets if isinstance(item, ast.Name))


def _entries(
    table: ast.expr, values: Mapping[str, ast.expr]
) -> Iterator[tuple[str, ast.expr | None]]:
    """Text keys, with their values, of a dict that is written out, named, or joined by ``|``.

    Of one that is made from another's keys the values are None.
    """
    if isinstance(table, ast.Name) and table.id in values:
        yield from _entries(values[table.id], values)
    elif isinstance(table, ast.BinOp):
        yield from _entries(table.left, values)
        yield from _entries(table.right, values)
    elif isinstance(table, ast.DictComp):
        source = table.generators[0].iter
        if isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute):
            yield from ((key, None) for key, _ in _entries(source.func.value, values))
    elif isinstance(table, ast.Dict):
        for key, value in zip(table.keys, table.values, strict=True):
            if key is None:
                yield from _entries(value, values)
            elif isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, value


def _text(value: ast.expr | None, values: Mapping[str, ast.expr]) -> str:
    """What a text, or an f-string of names and texts, says; "" for all else."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.Name):
        return _text(values.get(value.id), values)
    if isinstance(value, ast.FormattedValue):
        return _text(value.value, values)
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(part, values) for part in value.values)
    return ""


def _registered(path: Path) -> Iterator[tuple[str, str]]:
    """(registry, name) of each ``REGISTRY.register_module("name")`` in a file."""
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        registry = node.func.value
        name = node.args[0] if node.args else None
        is_named = isinstance(name, ast.Constant) and isinstance(name.value, str)
        if node.func.attr == "register_module" and isinstance(registry, ast.Name) and is_named:
            assert isinstance(name, ast.Constant)
            yield registry.id, str(name.value)


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file; empty for one that is missing or no Python."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ast.Module(body=[], type_ignores=[])
