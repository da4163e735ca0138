"""A run whose trainer is two processes, and one that trains an adapter."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.command import Command, processes_of
from tests.e2e.conftest import Start
from tests.e2e.test_grpo_run import scalars
from tests.e2e.toy import Toy
from trinity.checkpoint import layout
from trinity.common.models.utils import load_fsdp_state_dict_from_verl_checkpoint


def test_a_run_goes_on_from_one_rank_to_two(
    finished: Command, toy: Toy, start: Start, tmp_path: Path
) -> None:
    """Engines refuse weights whose digest is not the trainer's, so each run has checked that."""
    config = toy.config(
        tmp_path,
        buffer__total_steps=4,
        trainer={"dtype": "float32", "save_hf_checkpoint": "never", "num_processes": 2},
    )
    job = tmp_path / "jobs/toy/job"
    shutil.copytree(finished.job, job, ignore=shutil.ignore_patterns("monitor", "global_step_4"))
    run = start(config).succeed()
    assert "resumed at step 2" in run.screen
    assert run.remaining() == []
    assert (job / "log/trainer_rank_1.log").exists()
    shards = {path.name for path in (job / "global_step_4/actor").glob("model_*.pt")}
    assert shards == {f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1)}
    own, other = scalars(job, "trainer"), scalars(finished.job, "trainer")
    for name in ("actor/grad_norm", "critic/score/mean"):
        assert own[name] == pytest.approx(other[name][2:], rel=1e-3), name
    weights = load_fsdp_state_dict_from_verl_checkpoint(job / "global_step_4/actor")
    alone = load_fsdp_state_dict_from_verl_checkpoint(finished.job / "global_step_4/actor")
    for name, weight in weights.items():
        torch.testing.assert_close(weight, alone[name], atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_a_run_killed_while_two_ranks_save_goes_on_from_the_save_before(
    toy: Toy, start: Start, tmp_path: Path
) -> None:
    """The model is large enough for a save to take a while."""
    model = shutil.copytree(toy.model, tmp_path / "model")
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"intermediate_size": 100_000}))
    config = toy.config(
        tmp_path,
        model__model_path=str(model),
        trainer={"dtype": "float32", "num_processes": 2, "save_interval": 1},
        trainer__save_strategy="single_thread",
    )
    run = start(config)
    aside = run.job / ".global_step_2.saving"
    run.wait_for(lambda: any(aside.glob("actor/*.pt")), "the second save")
    for process in processes_of(run.mark):
        process.kill()
    run.wait()
    assert run.remaining() == []
    assert aside.is_dir() and not (run.job / "global_step_2").exists()
    again = start(config, "trainer.save_interval=0").succeed()
    assert "resumed at step 1" in again.screen
    assert "Checkpoint .global_step_2.saving is not whole" in again.screen
    assert not aside.exists()
    assert layout.find_latest(run.job) == layout.Found(run.job / "global_step_3")


def test_an_adapter_is_trained_synced_and_saved(toy: Toy, start: Start, tmp_path: Path) -> None:
    config = toy.config(
        tmp_path,
        buffer__total_steps=2,
        model__lora_configs=[{"lora_rank": 4, "lora_alpha": 8}],
        algorithm__kl_loss_fn="k2",
    )
    run = start(config).succeed()
    actor = run.job / "global_step_2/actor"
    shard = torch.load(actor / "model_world_size_1_rank_0.pt", weights_only=True)
    assert shard and all(".lora_" in name for name in shard)
    assert (actor / "lora_adapter/adapter_model.safetensors").is_file()
    model = AutoModelForCausalLM.from_pretrained(actor / "huggingface")
    assert not any("lora" in name for name, _ in model.named_parameters())
    found = scalars(run.job, "trainer")
    assert found["actor/kl_loss"][0] == 0 < found["actor/kl_loss"][1]
    assert max(found["actor/ratio_max_deviation"]) < 1e-5
