"""The pages made from the models are those in the repository, and their YAML validates."""

import re
from pathlib import Path

import pytest
import yaml

from tests.common.config.files import BASE, BLOCKS, merged, write
from trinity.common.config import Config
from trinity.common.config.docs import pages
from trinity.common.config.explain_errors import all_keys, model_at
from trinity.common.config.validate import validate_file
from trinity.common.config.verl.launch import import_verl

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", sorted(pages()))
def test_page_is_up_to_date(name):
    hint = "run: python -m trinity.common.config.docs"
    assert (ROOT / name).read_text(encoding="utf-8") == pages()[name], hint


def test_every_field_has_a_sentence():
    missing = []
    for key in all_keys():
        *path, name = key.replace("<name>", "x").replace("*", "0").split(".")
        place = [int(part) if part.isdigit() else part for part in path]
        field = (model_at(place) or Config).model_fields[name]
        sentence = (field.description or "").strip()
        if not re.match(r"[A-Z`v].*[.`)]$", sentence, re.DOTALL):
            missing.append((key, sentence))
    assert missing == []


def test_page_on_verl_validates(tmp_path):
    text = (ROOT / "docs/align_with_verl.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        tree = yaml.safe_load(block)
        tree = tree if "model" in tree else merged(BASE, tree)
        problems = validate_file(write(tmp_path, tree)).problems
        assert [str(problem) for problem in problems] == []


@pytest.mark.parametrize("name", ["verl_ppo", "verl_grpo"])
def test_page_on_verl_shows_what_the_command_prints(name):
    text = (ROOT / "docs/align_with_verl.md").read_text(encoding="utf-8")
    assert import_verl((BLOCKS / f"{name}.sh").read_text()).text() in text
