"""Explorer and trainer as two commands on one job, a database or a queue between them."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Start
from tests.e2e.test_grpo_run import scalars
from tests.e2e.toy import Toy
from tests.ray_head import ray_head

SYNC = {"sync_method": "checkpoint", "sync_interval": 1, "sync_timeout": 60}


def test_explorer_and_trainer_meet_in_a_database(toy: Toy, start: Start, tmp_path: Path) -> None:
    """Each has a Ray of its own: samples go through the database, weights through the folder."""
    database = {"storage_type": "sql", "path": f"sqlite:///{tmp_path}/shared.db"}
    meet(toy, start, tmp_path, database)


@pytest.mark.long
def test_explorer_and_trainer_meet_in_a_queue(toy: Toy, start: Start, tmp_path: Path) -> None:
    """The queue is a process of the cluster that both join."""
    with ray_head(num_cpus=4) as address:
        meet(toy, start, tmp_path, {"storage_type": "queue"}, cluster__ray_address=address)


def meet(
    toy: Toy, start: Start, tmp_path: Path, storage: dict[str, str], **cluster: object
) -> None:
    settings = {
        "checkpoint_root_dir": str(tmp_path / "jobs"),
        "buffer__total_steps": 3,
        "buffer__trainer_input": {
            "experience_buffer": {"name": "shared", "max_read_timeout": 60, **storage}
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
