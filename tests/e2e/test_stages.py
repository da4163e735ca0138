"""Stages run one after the other, each from the model of the one before, and finished ones once."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.e2e.command import Command
from tests.e2e.conftest import Start
from tests.e2e.toy import Toy

SFT = {
    "stage_name": "warmup",
    "mode": "train",
    "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-2}},
    "buffer": {"train_batch_size": 8, "total_steps": 3},
}


def weights_of(run: Command, stage: str, step: int) -> dict[str, torch.Tensor]:
    actor = run.job / stage / f"global_step_{step}" / "actor"
    return load_file(actor / "huggingface" / "model.safetensors")


def test_the_second_stage_goes_on_from_the_first(toy: Toy, start: Start, tmp_path: Path) -> None:
    """It learns nothing itself (lr is 0), so that it ends with the weights it started from."""
    data = {
        "name": "sft",
        "path": str(toy.root / "sft.jsonl"),
        "format": {
            "prompt_type": "plaintext",
            "prompt_key": "question",
            "response_key": "answer",
        },
    }
    sft = {**SFT, "buffer": {**SFT["buffer"], "trainer_input": {"experience_buffer": data}}}
    config = toy.config(
        tmp_path,
        stages=[sft, {"stage_name": "rft"}],
        algorithm__optimizer__lr=0.0,
        buffer__total_steps=1000,
    )
    run = start(config)
    run.wait_for(
        lambda: (
            (run.job / "rft" / "log" / "trainer.log").exists()
            and "Step 2:" in (run.job / "rft" / "log" / "trainer.log").read_text()
        ),
        "a step of the second stage",
    )
    run.interrupt()
    assert run.wait() == 130
    assert json.loads((run.job / "stage_meta.json").read_text()) == {"latest_stage": 0}
    warmup, rft = run.summary["stages"]
    assert (warmup["steps"], warmup["algorithm"], rft["algorithm"]) == (3, "sft", "grpo")
    assert warmup["losses"][-1] < warmup["losses"][0]
    assert rft["max_ratio_deviation"] <= 1e-5

    done = rft["steps"]
    again = start(config, f"buffer.total_steps={done + 1}").succeed()
    assert "Stage warmup was finished before; skipped." in again.screen
    assert f"resumed at step {done}" in again.screen
    assert [stage["is_skipped"] for stage in again.summary["stages"]] == [True, False]
    first, second = weights_of(again, "warmup", 3), weights_of(again, "rft", done + 1)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert again.remaining() == []
