"""Examples of the trainer, run in a few steps: their files, their commands, what they leave."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.e2e.command import Command
from tests.e2e.conftest import Start
from tests.e2e.test_grpo_run import scalars
from tests.e2e.toy import Toy
from tests.trainer.toy import plain_model

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.long


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `prepare.py` of the quickstart makes: ``model`` and ``data``."""
    folder = tmp_path_factory.mktemp("quickstart")
    script = EXAMPLES / "quickstart" / "prepare.py"
    subprocess.run([sys.executable, str(script), "--folder", str(folder)], check=True)
    return folder


def example(path: str, folder: Path, prepared: Path | None = None, **changes: Any) -> Path:
    """A copy of an example's file that saves below ``folder``.

    Args:
        prepared: What stands in the place of ``examples/quickstart``.
        changes: Sections whose values are replaced one by one.
    """
    text = (EXAMPLES / path).read_text()
    if prepared is not None:
        text = text.replace("examples/quickstart/", f"{prepared}/")
    config = yaml.safe_load(text) | {"checkpoint_root_dir": str(folder)}
    for section, values in changes.items():
        config[section] |= values
    copied = folder / Path(path).name
    copied.write_text(yaml.safe_dump(config, sort_keys=False))
    return copied


def convert(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trinity.cli.launcher", "convert", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def folder_of(run: Command, step: int) -> Path:
    return run.job / f"global_step_{step}" / "actor" / "huggingface"


def test_stop_go_on_convert(start: Start, quickstart: Path, tmp_path: Path) -> None:
    """`examples/resume`, with steps of a fifth."""
    config = example("resume/digits.yaml", tmp_path, quickstart, trainer={"save_interval": 2})
    losses: list[float] = []
    for total, more in ((4, []), (8, []), (10, ["trainer.num_processes=2"])):
        run = start(config, f"buffer.total_steps={total}", *more).succeed()
        assert not losses or f"resumed at step {len(losses)}" in run.screen
        losses += run.summary["stages"][0]["losses"]
        assert len(losses) == total
    assert losses[-1] < losses[0]
    kept = [6, 8, 10]
    assert [(folder_of(run, step) / "model.safetensors").exists() for step in kept] == [
        False, True, True,
    ]  # fmt: skip
    one = convert("--checkpoint-dir", str(run.job / "global_step_8"))
    assert one.returncode == 0 and "skipped" in one.stdout, one.stdout
    every = convert("--checkpoint-dir", str(run.job))
    assert every.returncode == 0 and every.stdout.count("skipped") == 2, every.stdout
    for step in kept:
        AutoModelForCausalLM.from_pretrained(folder_of(run, step))


def test_ppo_with_a_critic(start: Start, quickstart: Path, tmp_path: Path) -> None:
    config = example("algorithms/ppo.yaml", tmp_path, quickstart)
    given = yaml.safe_load(config.read_text())
    warmup, ppo = given["stages"]
    warmup["buffer"]["total_steps"] = 3
    ppo["trainer"]["critic_warmup"] = 1
    config.write_text(yaml.safe_dump(given))
    plugins = EXAMPLES / "quickstart" / "plugins"
    run = start(config, "buffer.total_steps=3", plugins=plugins).succeed()
    assert [stage["steps"] for stage in run.summary["stages"]] == [3, 3]
    found = scalars(run.job / "ppo", "trainer")
    assert len(found["critic/grad_norm"]) == 3 and min(found["critic/grad_norm"]) > 0
    assert len(found["actor/grad_norm"]) == 2, "the first step is the critic's alone"
    assert (run.job / "ppo/global_step_3/critic/model_world_size_1_rank_0.pt").exists()


def test_an_adapter(toy: Toy, start: Start, tmp_path: Path) -> None:
    """`examples/lora` with a model of a few thousand weights, which gets no sentence right."""
    model = shutil.copytree(toy.model, tmp_path / "model")
    plain_model(str(model)).save_pretrained(model)
    tasks = {"path": str(toy.root / "train.jsonl")}
    config = example(
        "lora/sentence_lora.yaml", tmp_path, model={"model_path": str(model)},
        buffer={"batch_size": 2}, trainer={"save_interval": 1},
    )  # fmt: skip
    given = yaml.safe_load(config.read_text())
    inputs = given["buffer"]["explorer_input"]
    inputs["taskset"] |= tasks
    inputs["eval_tasksets"][0] |= {"path": str(toy.root / "eval.jsonl")}
    inputs["default_reward_fn_type"] = "toy_reward"
    given["model"] |= {"max_prompt_tokens": 24, "max_response_tokens": 8}
    config.write_text(yaml.safe_dump(given))
    run = start(config, "buffer.total_steps=2").succeed()
    assert scalars(run.job, "trainer")["actor/grad_norm"][0] > 0
    refused = convert("-c", str(run.job))
    assert refused.returncode == 1 and "--merge" in refused.stderr
    merged = convert("--checkpoint-dir", str(run.job), "--base-model-dir", str(model), "--merge")
    assert merged.returncode == 0, merged.stderr
    first, last = (AutoModelForCausalLM.from_pretrained(folder_of(run, n)) for n in (1, 2))
    base = AutoModelForCausalLM.from_pretrained(model)
    weights = [m.model.layers[0].mlp.up_proj.weight for m in (base, first, last)]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


def test_experts_of_the_rollout_are_taken_in_training(start: Start, tmp_path: Path) -> None:
    """`examples/router_replay` in a few steps: all tokens but the last of a row have routes."""
    made = tmp_path / "made"
    script = EXAMPLES / "router_replay" / "prepare.py"
    subprocess.run([sys.executable, str(script), "--folder", str(made)], check=True)
    config = example("router_replay/moe.yaml", tmp_path)
    config.write_text(config.read_text().replace("examples/router_replay/", f"{made}/"))
    plugins = EXAMPLES / "quickstart" / "plugins"
    short = ["stages.0.buffer.total_steps=3", "buffer.total_steps=4", "explorer.eval_interval=4"]
    run = start(config, *short, plugins=plugins).succeed()
    found = scalars(run.job / "rft", "trainer")
    assert all(0.8 < share < 1 for share in found["routes/known_share"])
    assert found["actor/first_ratio_max_deviation"][0] < 1e-2
    assert [stage["steps"] for stage in run.summary["stages"]] == [3, 4]
