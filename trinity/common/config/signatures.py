"""Which arguments the classes take that ship with trinity, read off their source text.

Nothing is imported, as in `trinity.common.config.names`: most of them would bring torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, Optional, Union

from pydantic import PositiveInt

from trinity.common.config.names import PACKAGE, parse, table_of

Parameters = Mapping[str, Any]
"""Name of an argument -> its type; Any where that is not told, or not known here."""

_TYPES: Mapping[str, Any] = {
    **{kind.__name__: kind for kind in (bool, int, float, str, list, dict, tuple)},
    "Sequence": Sequence,
    "Mapping": Mapping,
    "Literal": Literal,
    "Optional": Optional,
    "Union": Union,
    "PositiveInt": PositiveInt,
}


def parameters_of(registry: str, name: str) -> Parameters | None:
    """As `parameters_of_class`, for what ``registry`` calls ``name``; None if that is not ours."""
    path = table_of(registry).get(name)
    return None if path is None else parameters_of_class(path)


@cache
def parameters_of_class(path: str) -> Parameters | None:
    """The arguments that the class of trinity's at the dotted ``path`` is made with.

    None where its source alone does not tell: it takes any, or is decorated.
    """
    module, _, class_name = path.rpartition(".")
    return _parameters(module, class_name)


@cache
def workflow_arguments(name: str) -> Parameters:
    """The `argument_types` of the workflow that ships as ``name``, with those of its bases."""
    module, _, class_name = table_of("WORKFLOWS").get(name, "").rpartition(".")
    return _declared(module, class_name)


def _declared(module: str, class_name: str) -> Parameters:
    found = _find(module, class_name)
    if found is None:
        return {}
    module, node, tree = found
    declared: dict[str, Any] = {}
    for base in reversed(node.bases):
        declared |= _declared(module, ast.unparse(base))
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and ast.unparse(item.target) == "argument_types":
            assert isinstance(item.value, ast.Dict)
            pairs = zip(item.value.keys, item.value.values, strict=True)
            declared |= {ast.literal_eval(k): _type(v, tree) for k, v in pairs if k is not None}
    return declared


def _find(module: str, class_name: str) -> tuple[str, ast.ClassDef, ast.Module] | None:
    """A class of trinity's, looked up where ``module`` has it from: there, and what it says."""
    tree = parse(PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return module, node, tree
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if alias.name == class_name and node.module.startswith(f"{PACKAGE.name}."):
                    return _find(node.module, class_name)
    return None


def _parameters(module: str, class_name: str) -> Parameters | None:
    """Those of its ``__init__``, or of the first base that has one; of a dataclass its fields."""
    found = _find(module, class_name)
    if found is None:
        return {} if class_name in ("ABC", "object") else None
    module, node, tree = found
    if node.decorator_list:
        is_dataclass = ast.unparse(node.decorator_list[0]).startswith("dataclass")
        return dict(_fields(node, tree)) if is_dataclass and not node.bases else None
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            given = item.args
            if given.kwarg is not None or item.decorator_list:
                return None
            taken = [*given.posonlyargs, *given.args, *given.kwonlyargs][1:]
            return {a.arg: _type(a.annotation, tree) for a in taken}
    for base in node.bases:
        inherited = _parameters(module, base.id) if isinstance(base, ast.Name) else None
        if inherited != {}:
            return inherited
    return {}


def _fields(node: ast.ClassDef, tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id, _type(item.annotation, tree)


def _type(annotation: ast.expr | None, tree: ast.Module) -> Any:
    """What ``annotation`` means in the module ``tree``; Any where other modules define it."""
    match annotation:
        case ast.Constant(value=None):
            return None
        case ast.Name(id=name) if name in _TYPES:
            return _TYPES[name]
        case ast.Name(id=name):
            return _type(_assigned(name, tree), tree)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return Union[_type(left, tree), _type(right, tree)]  # noqa: UP007  # made of values
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return Literal[ast.literal_eval(choices)]
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in _TYPES:
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return _TYPES[name][tuple(_type(part, tree) for part in parts)]
    return Any


def _assigned(name: str, tree: ast.Module) -> ast.expr | None:
    """What the module ``tree`` calls ``name``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(ast.unparse(t) == name for t in node.targets):
            return node.value
    return None
