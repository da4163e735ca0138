"""Ctrl-C, once and twice; and the same job in a second terminal."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import Start
from tests.e2e.toy import Toy


def test_ctrl_c_saves_and_a_second_start_of_the_job_is_refused(
    toy: Toy, start: Start, tmp_path: Path
) -> None:
    config = toy.config(tmp_path, buffer__total_steps=1000)
    run = start(config)
    run.wait_for_step(1)

    second = start(config)
    assert second.wait() == 2
    assert f"process {run.process.pid}" in second.last_lines

    run.interrupt()
    assert run.wait() == 130
    assert run.summary["status"] == "interrupted"
    steps = run.summary["stages"][0]["steps"]
    latest = (run.job / "latest_checkpointed_iteration.txt").read_text()
    assert int(latest) == steps >= 1
    folder = run.job / f"global_step_{steps}"
    assert (folder / "explorer_meta.json").is_file()
    assert (folder / "actor" / "huggingface" / "model.safetensors").is_file()
    assert "toy/job: interrupted" in run.screen
    assert run.remaining() == []


def test_sigterm_to_the_whole_process_group_ends_the_run_as_ctrl_c_does(
    toy: Toy, start: Start, tmp_path: Path
) -> None:
    """So `timeout` and Slurm end a job."""
    run = start(toy.config(tmp_path, buffer__total_steps=1000))
    run.wait_for_step(1)
    os.killpg(run.process.pid, signal.SIGTERM)
    assert run.wait() == 130
    assert run.summary["status"] == "interrupted"
    steps = run.summary["stages"][0]["steps"]
    assert (run.job / f"global_step_{steps}" / "explorer_meta.json").is_file()
    said = run.screen[run.screen.index("Stopping: the training step under way") :]
    assert "is lost" not in said and "died" not in said and "GCS" not in said
    assert run.remaining() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_run_starts_ends_it(
    toy: Toy, start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    run = start(toy.config(tmp_path, buffer__total_steps=1000))
    run.wait_for((run.job / "summary.json").exists, "a summary")
    assert run.summary["status"] == "running"  # and not what an earlier run came to
    run.process.send_signal(number)
    assert run.wait() == 130
    assert run.summary["status"] == "interrupted" and run.summary["error"] is None
    assert run.remaining() == []


@pytest.mark.long
def test_a_second_ctrl_c_stops_at_once(toy: Toy, start: Start, tmp_path: Path) -> None:
    """The loss is a plugin, of a folder in the environment, and each step takes minutes."""
    mark = tmp_path / "training"
    config = toy.config(
        tmp_path,
        algorithm__policy_loss_fn="toy_slow_loss",
        algorithm__policy_loss_fn_args={"seconds": 1000, "mark": str(mark)},
    )
    run = start(config, plugins=None, env={"TRINITY_PLUGIN_DIRS": str(toy.plugins)})
    run.wait_for(mark.exists, "a training step")
    run.interrupt()
    run.wait_for(lambda: "Press Ctrl-C again" in run.screen, "an answer")
    assert run.process.poll() is None
    run.interrupt()
    assert run.wait() == 130  # the step would take longer
    assert not list(run.job.glob("global_step_*"))
    assert run.remaining() == []
