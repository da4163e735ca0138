"""The core runs with every optional package absent; whoever asks for one is told its extra."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest

from tests.e2e.conftest import Start
from tests.e2e.toy import Toy

ROOT = Path(__file__).parents[2]
_ABSENT = """
from importlib.machinery import PathFinder

found = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {names!r} else found(name, path, target)

PathFinder.find_spec = staticmethod(find_spec)
"""


def needed(requirements: Iterable[str], seen: set[str]) -> set[str]:
    """All distributions that ``requirements`` bring, by normalized names; ``seen`` included."""
    for line in requirements:
        name = _normalized(re.split(r"[^\w.-]", line, maxsplit=1)[0])
        if "extra ==" in line or name in seen:
            continue
        seen.add(name)
        with suppress(metadata.PackageNotFoundError):
            needed(metadata.requires(name) or (), seen)
    return seen


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-")


def optional_modules() -> set[str]:
    """Modules of packages that some extra brings and the core does not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = needed(project["dependencies"], set())
    extras = project["optional-dependencies"]
    lines = [line for name, extra in extras.items() if name != "dev" for line in extra]
    optional = needed(lines, set()) - core
    found = metadata.packages_distributions().items()
    here = {module for module, owners in found if set(map(_normalized, owners)) <= optional}
    return here | {"vllm", "verl", "flash_attn", "wandb", "mlflow", "streamlit"}


@pytest.fixture
def core_alone(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process in which no optional package can be imported."""
    folder = tmp_path / "absent"
    folder.mkdir()
    names = sorted(optional_modules())
    assert {"openai", "fastapi", "tinker"} <= set(names)
    (folder / "sitecustomize.py").write_text(_ABSENT.format(names=set(names)))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", str(ROOT))])
    probe = [sys.executable, "-c", "import openai"]
    done = subprocess.run(probe, env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    assert b"No module named 'openai'" in done.stderr
    yield {"PYTHONPATH": path}


def test_a_run_needs_no_optional_package(
    toy: Toy, start: Start, tmp_path: Path, core_alone: dict[str, str]
) -> None:
    run = start(toy.config(tmp_path), env=core_alone).succeed()
    assert run.summary["stages"][0]["steps"] == 3


@pytest.mark.parametrize(
    ("override", "extra"),
    [
        ("explorer.rollout_model.enable_openai_api=true", "api"),
        ("trainer.trainer_type=verl", "verl"),
        ("monitor.monitor_type=wandb", "wandb"),
    ],
)
def test_who_asks_for_an_absent_package_is_told_its_extra(
    toy: Toy, start: Start, tmp_path: Path, core_alone: dict[str, str], override: str, extra: str
) -> None:
    run = start(toy.config(tmp_path), override, env=core_alone)
    assert run.wait() in (1, 2)
    assert f"trinity-rft[{extra}]" in run.last_lines
    assert "Traceback" not in run.screen
    assert run.remaining() == []
