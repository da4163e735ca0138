"""Whatever stands in a file, checking it ends with an answer, not with a traceback."""

import random
from typing import Any

import yaml

from tests.common.config.files import BASE, BLOCKS, write
from trinity.common.config.explain_errors import all_keys
from trinity.common.config.validate import validate_file

JUNK: list[Any] = [
    None,
    "",
    "x",
    0,
    -1,
    1.5,
    True,
    [],
    {},
    [1],
    ["a", None],
    {"a": 1},
    [{}],
    [{"name": 1}],
    "${model.model_path}",
    "${nothing.here}",
    "${oc.env:NO_SUCH_VARIABLE}",
    "1e-6",
    "None",
    10**30,
    float("nan"),
]


def _put(tree: Any, path: list[str], value: Any) -> None:
    node = tree
    for part in path[:-1]:
        if isinstance(node, list):
            node = node[0] if node else {}
        child = node.get(part) if isinstance(node, dict) else None
        if not isinstance(child, dict | list):
            if not isinstance(node, dict):
                return
            node[part] = child = {}
        node = child
    if isinstance(node, dict):
        node[path[-1]] = value


def test_junk_at_every_key(tmp_path):
    keys = [key for key in all_keys() if "<name>" not in key]
    chance = random.Random(0)
    for start in range(0, len(keys), 3):
        tree = yaml.safe_load(yaml.safe_dump(BASE))
        for key in keys[start : start + 3]:
            parts = [part for part in key.split(".") if part != "*"]
            _put(tree, parts, chance.choice(JUNK))
        verdict = validate_file(write(tmp_path, tree))
        for problem in verdict.problems:
            assert problem.message
            assert str(problem)


def test_junk_in_whole_files(tmp_path):
    chance = random.Random(1)
    pages = [yaml.safe_load(path.read_text()) for path in sorted(BLOCKS.glob("align_*_[23].yaml"))]
    for _ in range(60):
        tree = yaml.safe_load(yaml.safe_dump(chance.choice(pages)))
        for _ in range(chance.randint(1, 4)):
            _spoil(tree, chance)
        validate_file(write(tmp_path, tree))


def _spoil(node: Any, chance: random.Random) -> None:
    """Put junk at a random place below ``node``."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = chance.choice(keys)
        if not isinstance(node[key], dict | list) or chance.random() < 0.3:
            node[key] = chance.choice(JUNK)
            return
        node = node[key]


def test_torn_files(tmp_path):
    chance = random.Random(2)
    text = (BLOCKS / "quickstart_0.yaml").read_text()
    for _ in range(60):
        cut = chance.randrange(len(text))
        torn = text[:cut] + chance.choice(["", "\t", "{", ": :", "'", "\n- x", "\0"]) + text[cut:]
        verdict = validate_file(write(tmp_path, torn[: chance.randrange(cut, len(torn)) + 1]))
        assert verdict.config is not None or verdict.problems


def test_an_alias_inside_itself(tmp_path):
    [problem] = validate_file(write(tmp_path, "model: &m\n  tinker: *m\n")).problems
    assert "alias" in problem.message
