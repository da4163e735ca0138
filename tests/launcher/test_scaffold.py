import subprocess
import sys
from pathlib import Path

import pytest

from trinity.launcher.scaffold import KINDS, ScaffoldError, how_to_use, write_plugin

ROOT = Path(__file__).parents[2]


def test_every_kind_comes_with_a_test_that_passes(tmp_path):
    for kind in KINDS:
        write_plugin(kind, f"my_{kind}", tmp_path / "plugins")
        assert f"my_{kind}" in how_to_use(kind, f"my_{kind}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "plugins"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for check in (["check", "--select", "E,F,B"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--isolated", "--line-length", "100"]
        done = subprocess.run([*command, "."], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("workflw", "x", "workflow, reward"),
        ("reward", "my-reward", "small letters"),
        ("reward", "class", "can't be the name"),
        ("reward", "there", "exists already"),
    ],
)
def test_what_can_not_be_written_is_told(tmp_path, kind, name, text):
    (tmp_path / "there.py").write_text("mine")
    with pytest.raises(ScaffoldError, match=text):
        write_plugin(kind, name, tmp_path)
    assert (tmp_path / "there.py").read_text() == "mine"
