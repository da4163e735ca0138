"""Every YAML block of the documentation pages validates, completed where it is a fragment."""

import re

import pytest
import yaml

from tests.common.config.files import BASE, BLOCKS, merged, write
from trinity.common.config import derive, iterate_stages
from trinity.common.config.source import parse_tree
from trinity.common.config.validate import validate_file

VARIABLES = (
    "MODEL_PATH",
    "TRINITY_MODEL_PATH",
    "TRINITY_TASKSET_PATH",
    "TRINITY_SFT_DATASET_PATH",
    "TRINITY_DATASET_PATH",
)


def _fragment(name: str) -> dict:
    text = (BLOCKS / f"{name}.yaml").read_text()
    lines = [line for line in text.splitlines() if line.strip() not in ("...", "-")]
    return _without_dots(parse_tree("\n".join(lines)).data)


def _without_dots(node):
    """Leave out what the page only hints at: `model: ...`."""
    if isinstance(node, dict):
        kept = {key: _without_dots(value) for key, value in node.items() if value != "..."}
        return {key: value for key, value in kept.items() if value is not None}
    return [_without_dots(item) for item in node] if isinstance(node, list) else node


def _completed(name: str) -> dict:
    if name == "configuration_16":
        block = parse_tree((BLOCKS / f"{name}.yaml").read_text()).data
        return merged(BASE, {"trainer": {"trainer_config": block}})
    fragment = _fragment(name)
    is_whole = "model" in fragment and "buffer" in fragment
    return fragment if is_whole else merged(BASE, fragment)


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, f"/paths/{name.lower()}")


PLUGIN = """
@REWARD_FUNCTIONS.register_module("custom_reward")
def custom_reward(response, truth):
    return {"score": 1.0}
"""

NAMES = sorted(path.stem for path in BLOCKS.glob("*.yaml"))


def test_all_blocks_are_here():
    assert len([name for name in NAMES if name.startswith("configuration_")]) == 17
    assert len(NAMES) == 23


@pytest.mark.parametrize("name", NAMES)
def test_block_validates(name, tmp_path):
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "mine.py").write_text(PLUGIN)
    verdict = validate_file(write(tmp_path, _completed(name)), plugin_dirs=[plugins])
    assert [str(problem) for problem in verdict.problems] == []
    assert verdict.config is not None
    for _, stage in iterate_stages(verdict.config):
        once = derive(stage)
        again = derive(once.config)
        assert again.config == once.config
        assert again.notes == []
        once.config.save(tmp_path / "saved.yaml")
        saved = validate_file(tmp_path / "saved.yaml", plugin_dirs=[plugins])
        assert [str(problem) for problem in saved.problems] == []
        assert saved.config == once.config


@pytest.mark.parametrize("name", ["quickstart_0", "align_with_verl_2", "align_with_verl_3"])
def test_whole_files_validate_as_printed(name):
    verdict = validate_file(BLOCKS / f"{name}.yaml")
    assert verdict.problems == []


def test_verl_block_refers_to_its_own_keys(tmp_path):
    config = validate_file(write(tmp_path, _completed("configuration_16"))).config
    block = config.trainer.trainer_config
    assert block["critic"]["ppo_epochs"] == 1
    assert block["actor_rollout_ref"]["ref"]["log_prob_max_token_len_per_gpu"] == 16384
    assert block["critic"]["forward_max_token_len_per_gpu"] == 32768
    assert block["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-6
    assert block["actor_rollout_ref"]["model"]["fused_kernel_options"]["impl_backend"] is None


def test_backtick_quotes_are_read(tmp_path):
    text = yaml.safe_dump(BASE)
    text = re.sub(r"name: train", "name: `train`", text)
    config = validate_file(write(tmp_path, text)).config
    assert config.buffer.explorer_input.taskset.name == "train"


def test_quickstart_stages_validate_in_the_quickstart_file(tmp_path):
    tree = {**_fragment("quickstart_0"), **_fragment("quickstart_1")}
    verdict = validate_file(write(tmp_path, tree))
    assert verdict.problems == []
    first, second = [stage for _, stage in iterate_stages(verdict.config)]
    assert (first.mode, first.algorithm.algorithm_type) == ("train", "sft")
    assert derive(first).config.synchronizer.sync_method == "checkpoint"
    assert (second.mode, second.algorithm.algorithm_type) == ("both", "grpo")
    assert derive(second).config.buffer.train_batch_size == 1024
