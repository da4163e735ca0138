"""Which arguments the classes take that ship with trinity, read off their source text.

Nothing is imported, as in `trinity.common.config.names`: most of them would bring torch.
"""

from __future__ import annotations

import ast
from functools import cache

from trinity.common.config.names import PACKAGE, parse, table_of


def parameters_of(registry: str, name: str) -> tuple[str, ...] | None:
    """As `parameters_of_class`, for what ``registry`` calls ``name``; None if that is not ours."""
    path = table_of(registry).get(name)
    return None if path is None else parameters_of_class(path)


@cache
def parameters_of_class(path: str) -> tuple[str, ...] | None:
    """Names of the arguments that the class of trinity's at the dotted ``path`` is made with.

    None where its source alone does not tell: it takes any, or is decorated.
    """
    module, _, class_name = path.rpartition(".")
    return _parameters(module, class_name)


def _parameters(module: str, class_name: str) -> tuple[str, ...] | None:
    tree = parse(PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return None if node.decorator_list else _of_class(module, node)
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if alias.name == class_name and node.module.startswith(f"{PACKAGE.name}."):
                    return _parameters(node.module, class_name)
    return () if class_name in ("ABC", "object") else None


def _of_class(module: str, node: ast.ClassDef) -> tuple[str, ...] | None:
    """Those of its ``__init__``, or of the first base that has one."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            given = item.args
            if given.kwarg is not None or item.decorator_list:
                return None
            names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            return tuple(names[1:])
    for base in node.bases:
        found = _parameters(module, base.id) if isinstance(base, ast.Name) else None
        if found != ():
            return found
    return ()
