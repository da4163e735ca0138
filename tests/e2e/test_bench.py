"""Mode bench: the starting model and the checkpoints of a job, each with its score."""

import shutil
from pathlib import Path

import pytest
import yaml

from tests.e2e.command import Command
from tests.e2e.conftest import Start
from tests.e2e.test_grpo_run import scalars

SCORE = "bench/unseen/accuracy/mean@1"


@pytest.fixture
def job(finished: Command, tmp_path: Path) -> Path:
    """A configuration of mode bench over a copy of the finished job; its step 2 has shards only."""
    config = yaml.safe_load(finished.config.read_text())
    shutil.copytree(finished.job, tmp_path / "jobs" / "toy" / "job")
    shutil.rmtree(tmp_path / "jobs/toy/job/monitor")
    huggingface = tmp_path / "jobs/toy/job/global_step_2/actor/huggingface"
    (huggingface / "model.safetensors").unlink()
    (huggingface.parent.parent / ".full_checkpoint").unlink()
    config |= {"mode": "bench", "checkpoint_root_dir": str(tmp_path / "jobs")}
    path = tmp_path / "bench.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_all_checkpoints_are_scored_as_in_training(
    finished: Command, job: Path, start: Start
) -> None:
    run = start(job).succeed()
    evals = run.summary["stages"][0]["evals"]
    assert list(evals) == ["0", "2", "4"]
    assert scalars(run.job, "benchmark")[SCORE] == pytest.approx([e[SCORE] for e in evals.values()])
    trained = finished.summary["stages"][0]
    name = "eval/unseen/accuracy/mean@1"
    assert evals["0"][SCORE] == trained["eval_before"][name]
    assert evals["4"][SCORE] == trained["eval_after"][name]
    assert (run.job / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    assert run.remaining() == []


@pytest.mark.long
def test_only_the_newest_if_asked(job: Path, start: Start) -> None:
    run = start(
        job, "explorer.bench_on_latest_checkpoint=true", "explorer.eval_on_startup=false"
    ).succeed()
    assert list(run.summary["stages"][0]["evals"]) == ["4"]
