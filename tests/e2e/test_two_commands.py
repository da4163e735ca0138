"""Explorer and trainer as two commands on one job, a database or a queue between them."""

import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Start
from tests.e2e.test_grpo_run import scalars
from tests.e2e.toy import Toy
from tests.ray_head import ray_head

LIMIT_S = 400  # far more than anything here takes, a start beside others too
SYNC = {"sync_method": "checkpoint", "sync_interval": 1, "sync_timeout": LIMIT_S}


def test_explorer_and_trainer_meet_in_a_database(toy: Toy, start: Start, tmp_path: Path) -> None:
    """Each has a Ray of its own: samples go through the database, weights through the folder."""
    database = {"storage_type": "sql", "path": f"sqlite:///{tmp_path}/shared.db"}
    meet(toy, start, tmp_path, database)


@pytest.mark.long
def test_explorer_and_trainer_meet_in_a_queue(toy: Toy, start: Start, tmp_path: Path) -> None:
    """The queue is a process of the cluster that both join."""
    with ray_head(num_cpus=4) as address:
        meet(toy, start, tmp_path, {"storage_type": "queue"}, cluster__ray_address=address)


@pytest.mark.parametrize(
    ("victim", "sync_s", "read_s", "is_told"),
    [
        ("train", 60, LIMIT_S, "Waited 60 s for weights newer than version"),
        pytest.param(
            *("explore", LIMIT_S, 60, "Waited 60 s for experiences in the table 'shared'"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_who_waits_for_a_command_that_was_killed_ends_within_the_deadline(
    toy: Toy, start: Start, tmp_path: Path, victim: str, sync_s: int, read_s: int, is_told: str
) -> None:
    database = {"storage_type": "sql", "path": f"sqlite:///{tmp_path}/shared.db"}
    settings = {
        "checkpoint_root_dir": str(tmp_path / "jobs"),
        "buffer__total_steps": 1000,
        "buffer__trainer_input": {
            "experience_buffer": {"name": "shared", "max_read_timeout": read_s, **database}
        },
        "synchronizer": {**SYNC, "sync_timeout": sync_s},
    }
    part, other = ("trainer", "explore") if victim == "train" else ("explorer", "train")
    killed = start(toy.config(tmp_path / victim, mode=victim, **settings))
    killed.wait_for((killed.job / "log" / f"{part}.log").exists, "a start")  # who waits comes then
    left = start(toy.config(tmp_path / other, mode=other, **settings))
    (killed if victim == "train" else left).wait_for_step(2)
    killed.process.kill()
    start_s = time.monotonic()
    assert left.wait() == 1
    assert time.monotonic() - start_s < LIMIT_S
    assert is_told in left.last_lines
    assert "Traceback" not in left.screen
    assert left.remaining() == []


@pytest.mark.long
@pytest.mark.parametrize("save_interval", [0, 3])
def test_a_trainer_that_was_killed_goes_on_beside_the_explorer(
    toy: Toy, start: Start, tmp_path: Path, save_interval: int
) -> None:
    """Its newest weights are of a step after its checkpoint."""
    database = {"storage_type": "sql", "path": f"sqlite:///{tmp_path}/shared.db"}
    settings = {
        "checkpoint_root_dir": str(tmp_path / "jobs"),
        "buffer__total_steps": 8,
        "buffer__explorer_input__taskset": {
            "default_reward_fn_type": "toy_reward",
            "reward_fn_args": {"seconds": 1.0},
        },
        "buffer__trainer_input": {
            "experience_buffer": {"name": "shared", "max_read_timeout": LIMIT_S, **database}
        },
        "synchronizer": SYNC,
        "trainer__save_interval": save_interval,
    }
    exploring = start(toy.config(tmp_path / "e", mode="explore", **settings))
    killed = start(toy.config(tmp_path / "t", mode="train", **settings))
    killed.wait_for_step(5)
    killed.process.kill()
    killed.wait()
    training = start(toy.config(tmp_path / "t", mode="train", **settings)).succeed()
    exploring.succeed()
    steps = scalars(training.job, "trainer")["sample/task_count"]
    assert len(steps) >= 8 and set(steps) == {4}
    assert training.summary["stages"][0]["steps"] == 8


def meet(
    toy: Toy, start: Start, tmp_path: Path, storage: dict[str, str], **cluster: object
) -> None:
    settings = {
        "checkpoint_root_dir": str(tmp_path / "jobs"),
        "buffer__total_steps": 3,
        "buffer__trainer_input": {
            "experience_buffer": {"name": "shared", "max_read_timeout": LIMIT_S, **storage}
        },
        "synchronizer": SYNC,
        **cluster,
    }
    exploring = start(toy.config(tmp_path / "e", mode="explore", **settings))
    training = start(toy.config(tmp_path / "t", mode="train", **settings))
    training.succeed()
    exploring.succeed()
    assert scalars(exploring.job, "explorer")["rollout/model_version"] == [0, 1, 2]
    found = scalars(training.job, "trainer")
    assert found["sample/task_count"] == [4] * 3
    assert found["sample/model_version/min"] == [0, 1, 2]
    assert found["actor/first_ratio_max_deviation"] <= [1e-5] * 3
    assert exploring.remaining() == [] == training.remaining()
