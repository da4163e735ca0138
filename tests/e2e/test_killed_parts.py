"""A process of a run dies: runners and engines come back, without the trainer the run ends."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.command import Command
from tests.e2e.conftest import Start
from tests.e2e.test_grpo_run import scalars
from tests.e2e.toy import Toy

SLOW_REWARD = {"default_reward_fn_type": "toy_reward", "reward_fn_args": {"seconds": 0.5}}


def held(tmp_path: Path, task: int) -> tuple[Path, dict[str, object]]:
    """A task set whose run waits at a task (four are a step) for a file, and that file."""
    file = tmp_path / "go"
    return file, {"reward_fn_args": {"waits_on": f"t{task} ", "waits_for": str(file)}}


def finishes_without_engine(run: Command, pid: int, steps: int, go: Path) -> None:
    """Kill the process that the engine computes in; all ``steps`` of four tasks count once."""
    os.kill(pid, signal.SIGKILL)
    run.wait_for(lambda: "Engine 0 died" in run.log("explorer"), "the death")
    go.touch()
    run.succeed()
    assert "Engine 0 is ready again" in run.log("explorer")
    found = scalars(run.job, "explorer")
    assert found["rollout/experience_count"] == [16] * steps
    assert found["rollout/finished_task_count"] == [4] * steps
    assert found["rollout/model_version"] == list(range(steps))
    assert scalars(run.job, "trainer")["sample/model_version/mean"] == list(range(steps))
    assert run.summary["stages"][0]["samples"] == 16 * steps


def test_a_killed_runner_is_replaced_and_nothing_counts_twice(
    toy: Toy, start: Start, tmp_path: Path
) -> None:
    go, tasks = held(tmp_path, task=9)  # of step 3
    run = start(toy.config(tmp_path, buffer__explorer_input__taskset=tasks))
    runner = run.pid_of("explorer_runner_0")
    run.wait_for(lambda: "Step 1:" in run.log("explorer"), "step 1")
    os.kill(runner, signal.SIGKILL)
    go.touch()
    run.succeed()
    found = scalars(run.job, "explorer")
    assert found["rollout/experience_count"] == [16] * 3
    assert found["rollout/finished_task_count"] == [4] * 3
    assert sum(found["rollout/lost_runner_count"]) == 1
    assert sum(found["rollout/failed_task_count"]) == 0
    assert scalars(run.job, "trainer")["sample/task_count"] == [4] * 3
    assert run.summary["stages"][0]["samples"] == 48


def test_a_killed_engine_comes_back_with_the_weights_of_the_others(
    toy: Toy, start: Start, tmp_path: Path
) -> None:
    go, tasks = held(tmp_path, task=17)  # of step 5
    config = toy.config(tmp_path, buffer__total_steps=6, buffer__explorer_input__taskset=tasks)
    run = start(config)
    engine = run.pid_of("engine")
    run.wait_for(lambda: "Step 3:" in run.log("explorer"), "step 3")
    finishes_without_engine(run, engine, 6, go)


@pytest.mark.parametrize(
    ("part", "ranks"), [("trainer", 1), pytest.param("trainer_rank_1", 2, marks=pytest.mark.long)]
)
def test_a_killed_trainer_ends_the_run_and_is_named_last(
    toy: Toy, start: Start, tmp_path: Path, part: str, ranks: int
) -> None:
    config = toy.config(
        tmp_path,
        buffer__total_steps=100,
        buffer__explorer_input__taskset=SLOW_REWARD,
        trainer={"dtype": "float32", "num_processes": ranks},
    )
    run = start(config)
    run.wait_for_step(1)
    os.kill(run.pid_of(part), signal.SIGKILL)
    assert run.wait() == 1
    assert f"{part}: the process was killed" in run.last_lines
    assert "Traceback" not in run.screen
    assert run.summary["status"] == "failed"
    assert "trainer" in run.summary["error"]
    assert run.remaining() == []


@pytest.mark.long
def test_a_trainer_that_hangs_in_a_sync_ends_the_run_within_the_deadline(
    toy: Toy, start: Start, tmp_path: Path
) -> None:
    config = toy.config(tmp_path, buffer__total_steps=1000, synchronizer__sync_timeout=60)
    run = start(config)
    run.wait_for_step(1)
    os.kill(run.pid_of("trainer"), signal.SIGSTOP)
    told = "Waited 60 s for weights newer than version"
    run.wait_for(lambda: told in run.screen, "the error")
    assert run.wait() == 1
    assert told in run.last_lines
    assert "from the trainer; the newest is version" in run.last_lines
    assert "Traceback" not in run.screen
    assert run.remaining() == []
