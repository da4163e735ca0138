"""Plugins that can't be had end each command with a sentence, and with frames of theirs alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.config.files import BASE, write

COMMANDS = {
    "run": ["run", "--config"],
    "validate": ["validate"],
    "explain": ["explain"],
    "debug": ["debug", "--fake", "x", "--config"],
    "data": ["data", "stats", "--config"],
}


def trinity(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trinity.cli.launcher", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(write(tmp_path, BASE))


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_folder_that_is_not_there_is_told_in_one_sentence(
    command: list[str], file: str, tmp_path: Path
) -> None:
    result = trinity(*command, file, "--plugin-dir", str(tmp_path / "plugnis"))
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"There is no plugin folder {tmp_path / 'plugnis'}. Correct the path after --plugin-dir."
    ]


def test_a_file_in_the_place_of_its_folder_is_told(file: str, tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.touch()
    result = trinity("run", "--config", file, "--plugin-dir", str(plugin))
    assert result.stderr.strip() == f"{plugin} is a file. Name its folder after --plugin-dir."


def test_a_folder_of_the_environment_that_is_not_there_names_the_variable(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_PLUGIN_DIRS", str(tmp_path / "gone"))
    assert "Correct TRINITY_PLUGIN_DIRS." in trinity("validate", file).stderr


@pytest.mark.parametrize("command", ["run", "validate"])
def test_a_plugin_that_is_no_python_is_told_with_its_line(
    command: str, file: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("x = 1\ndef f(:\n")
    result = trinity(*COMMANDS[command], file, "--plugin-dir", str(tmp_path))
    assert result.returncode == 2
    assert f"The plugin {tmp_path / 'mine.py'} is no Python: line 2" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_plugin_that_raises_shows_its_own_lines_alone(file: str, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def value():\n    return {}['missing']\n")
    (tmp_path / "a_mine.py").write_text("from .helper import value\nVALUE = value()\n")
    result = trinity("run", "--config", file, "--plugin-dir", str(tmp_path))
    assert result.returncode == 1
    frames = [line for line in result.stderr.splitlines() if line.startswith("  File")]
    assert [Path(line.split('"')[1]).name for line in frames] == ["a_mine.py", "helper.py"]
    assert result.stderr.splitlines()[-1] == "KeyError: 'missing'"


def test_a_folder_without_the_plugin_is_told_by_what_it_holds(file: str, tmp_path: Path) -> None:
    key = "buffer.explorer_input.default_workflow_type"
    command = ["validate", file, f"{key}=mine", "--plugin-dir", str(tmp_path)]
    (tmp_path / "rewards.py").write_text("")
    assert f"The plugins in {tmp_path} register no workflow: correct" in trinity(*command).stderr
    (tmp_path / "other.py").write_text('WORKFLOWS.register_module("theirs")\n')
    assert f"The plugins in {tmp_path} register only theirs: correct" in trinity(*command).stderr
