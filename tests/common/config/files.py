"""A small valid file, and ways to change it, for tests of the configuration."""

from pathlib import Path
from typing import Any

import yaml

BLOCKS = Path(__file__).parent / "blocks"

BASE: dict[str, Any] = {
    "name": "test",
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 8},
    "model": {"model_path": "/models/tiny", "max_prompt_tokens": 64, "max_response_tokens": 64},
    "cluster": {"node_num": 1, "gpu_per_node": 5},
    "buffer": {
        "batch_size": 4,
        "explorer_input": {"taskset": {"name": "train", "path": "/data/tasks"}},
    },
}


def with_edits(edits: dict[str, Any], base: dict[str, Any] | None = None) -> dict[str, Any]:
    """A copy of ``base`` with dotted keys set; a value of `DROP` removes the key."""
    tree = yaml.safe_load(yaml.safe_dump(BASE if base is None else base))
    for key, value in edits.items():
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        if value is DROP:
            del node[last]
        else:
            node[last] = value
    return tree


DROP = object()


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``base`` with the sections of ``over`` laid over it, key by key."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(value, dict) and isinstance(old, dict)
        result[key] = merged(old, value) if both else value
    return result


def write(folder: Path, tree: dict[str, Any] | str, name: str = "run.yaml") -> Path:
    """A file with ``tree``, or with the text itself."""
    path = folder / name
    text = tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False)
    path.write_text(text, encoding="utf-8")
    return path
