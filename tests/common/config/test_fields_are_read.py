"""No key is accepted and then ignored: every leaf field is read by code outside the config."""

import ast
from functools import cache
from pathlib import Path

import trinity
from trinity.common.config.explain_errors import all_keys

PACKAGE = Path(trinity.__file__).parent
CONFIG = PACKAGE / "common" / "config"

WORKED_OUT = {
    "derive.py": ("checkpoint_root_dir", "group"),
}


@cache
def names_read() -> frozenset[str]:
    """Attributes that are read, and texts, anywhere outside `trinity/common/config`."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if CONFIG in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


if __name__ == "__main__":
    names = names_read()
    for key in all_keys():
        if key.rpartition(".")[2] not in names:
            print(key)
