"""Every YAML file that ships loads, and every stage of it can be filled in."""

from pathlib import Path

import pytest

from trinity.common.config import derive, iterate_stages, load_config

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
