"""Every YAML file that ships loads, and every stage of it can be filled in."""

import re
from pathlib import Path

import pytest

from trinity.common.config import derive, iterate_stages, load_config
from trinity.common.config.validate import validate_file

ROOT = Path(__file__).parents[2]
FILES = sorted(
    [
        *(ROOT / "examples").glob("*/*.yaml"),
        *(ROOT / "benchmarks").glob("*.yaml"),
    ]
)


def test_the_examples_are_found() -> None:
    names = {file.name for file in FILES}
    assert {"quickstart.yaml", "demo_llm.yaml", "gsm8k.yaml"} <= names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_loads_without_old_spellings(file: Path) -> None:
    config = load_config(file, ("model.model_path=somewhere",))
    assert not config.source.warnings
    for stage in iterate_stages(config):
        assert derive(stage.config).config.checkpoint_job_dir


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_names_the_schema_for_editors(file: Path) -> None:
    first = file.read_text().splitlines()[0]
    schema = first.removeprefix("# yaml-language-server: $schema=")
    assert (file.parent / schema).resolve() == ROOT / "trinity.schema.json"


def _plugin_dirs(file: Path) -> list[Path]:
    """Those that a README's command names with the file, and those that lie beside it."""
    name = str(file.relative_to(ROOT))
    readmes = [page.read_text() for page in (ROOT / "examples").glob("*/README.md")]
    commands = re.findall(rf"--config {re.escape(name)}.*", "\n".join(readmes))
    found = {word for line in commands for word in re.findall(r"--plugin-dir (\S+)", line)}
    beside = file.parent / "plugins"
    return [ROOT / word for word in found] + ([beside] if beside.is_dir() else [])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_is_wrong_with_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_MODEL_PATH", "somewhere")
    monkeypatch.chdir(ROOT)
    given = ["model.model_path=somewhere", "buffer.explorer_input.taskset.path=there"]
    overrides = given if file.parent.name == "benchmarks" else []
    problems = validate_file(file, overrides, _plugin_dirs(file)).problems
    assert not [f"{p.key}: {p.message} {p.fix}" for p in problems]
