"""A run whose trainer is veRL's, and which changes its trainer type at a checkpoint."""

import shutil
from pathlib import Path

import pytest

from tests.e2e.command import Command
from tests.e2e.conftest import Start
from tests.e2e.test_grpo_run import scalars
from tests.e2e.toy import Toy

pytest.importorskip("verl")


def test_a_run_goes_from_torch_to_verl_and_back(
    finished: Command, toy: Toy, start: Start, tmp_path: Path
) -> None:
    """Engines refuse weights whose digest is not the trainer's, so each run has checked that."""
    config = toy.config(
        tmp_path,
        buffer__total_steps=4,
        trainer={
            "trainer_type": "verl",
            "dtype": "float32",
            "save_hf_checkpoint": "never",
            "num_processes": 2,
        },
    )
    job = tmp_path / "jobs/toy/job"
    shutil.copytree(finished.job, job, ignore=shutil.ignore_patterns("monitor", "global_step_4"))
    run = start(config).succeed()
    assert "resumed at step 2" in run.screen
    assert run.remaining() == []
    shards = {path.name for path in (job / "global_step_4/actor").glob("model_*.pt")}
    assert shards == {f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1)}
    own, other = scalars(job, "trainer"), scalars(finished.job, "trainer")
    for name in ("actor/grad_norm", "critic/score/mean"):
        assert own[name] == pytest.approx(other[name][2:], rel=1e-3), name
    torch_again = ("trainer.trainer_type=torch", "trainer.num_processes=1")
    back = start(config, "buffer.total_steps=5", *torch_again).succeed()
    assert "resumed at step 4" in back.screen
    again = start(config, "buffer.total_steps=6").succeed()
    assert "resumed at step 5" in again.screen
    assert len(scalars(job, "trainer")["actor/grad_norm"]) == 4


def test_a_key_that_verl_does_not_have_is_refused(toy: Toy, start: Start, tmp_path: Path) -> None:
    config = toy.config(
        tmp_path,
        buffer__total_steps=1,
        trainer={
            "trainer_type": "verl",
            "trainer_config": {"actor_rollout_ref": {"actor": {"fsdp_config": {"fsdp_sise": 2}}}},
        },
    )
    run = start(config)
    assert run.wait() != 0
    assert "Did you mean" in run.screen and "fsdp_config.fsdp_size" in run.screen
