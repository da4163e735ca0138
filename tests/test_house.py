"""The house rules that a machine can check: who may import whom, and where third parties live."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "trinity"

ROWS = {
    "utils": 0,
    "checkpoint": 0,
    "common": 1,
    "algorithm": 2,
    "rewards": 2,
    "buffer": 3,
    "workflows": 3,
    "engine": 3,
    "synchronizer": 3,
    "explorer": 4,
    "trainer": 4,
    "launcher": 5,
    "manager": 5,
    "perf": 5,
    "service": 5,
    "cli": 6,
}
"""Package -> its row. A package imports only from rows above its own, and within its own row
from no one but where `NEIGHBOURS` allows it."""

NEIGHBOURS = {"explorer": {"trainer"}, "trainer": {"explorer"}}
"""Packages of one row that never import each other."""

HOMES = {
    "ray": ("utils/actor.py", "launcher/", "trainer/backends/verl/"),
    "verl": ("trainer/backends/verl/",),
    "vllm": ("engine/vllm/",),
    "streamlit": ("manager/", "perf/"),
    "sqlalchemy": ("common/schema/", "buffer/storage/sql"),
    "tinker": ("engine/tinker/", "trainer/backends/tinker/"),
}
"""Third party -> the only places that import it."""

FILES = sorted(ROOT.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import in a file, those inside functions included."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_upward(path: Path):
    own = package_of(path)
    for line, name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "trinity" or len(parts) < 2 or parts[1] not in ROWS or own not in ROWS:
            continue
        other = parts[1]
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        assert ROWS[other] <= ROWS[own], f"{where}, which is in a lower row"
        assert other not in NEIGHBOURS.get(own, set()), f"{where}: these two never meet"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_third_parties_stay_at_home(path: Path):
    place = str(path.relative_to(ROOT))
    for line, name in imports_of(path):
        homes = HOMES.get(name.split(".")[0])
        if homes is not None:
            assert place.startswith(homes), f"{place}:{line} imports {name}; its home is {homes}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_says_what_it_owns(path: Path):
    tree = tree_of(path)
    is_plain_init = path.name == "__init__.py"
    assert is_plain_init or not tree.body or ast.get_docstring(tree), f"{path} has no docstring"


def test_the_rows_name_every_package():
    packages = {p.name for p in ROOT.iterdir() if p.is_dir() and any(p.glob("**/*.py"))}
    assert packages <= set(ROWS)
