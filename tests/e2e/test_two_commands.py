"""Explorer and trainer as two commands on the same job, with a database between them."""

from pathlib import Path

from tests.e2e.conftest import Start
from tests.e2e.test_grpo_run import scalars
from tests.e2e.toy import Toy


def test_explorer_and_trainer_meet_in_a_database(toy: Toy, start: Start, tmp_path: Path) -> None:
    """Each has a Ray of its own: samples go through the database, weights through the folder."""
    settings = {
        "buffer__total_steps": 3,
        "buffer__trainer_input": {
            "experience_buffer": {
                "name": "shared",
                "storage_type": "sql",
                "path": f"sqlite:///{tmp_path}/shared.db",
                "max_read_timeout": 60,
            }
        },
        "synchronizer": {"sync_method": "checkpoint", "sync_interval": 1, "sync_timeout": 60},
    }
    jobs = str(tmp_path / "jobs")
    exploring = start(
        toy.config(tmp_path / "e", mode="explore", checkpoint_root_dir=jobs, **settings)
    )
    training = start(toy.config(tmp_path / "t", mode="train", checkpoint_root_dir=jobs, **settings))
    training.succeed()
    exploring.succeed()
    assert scalars(exploring.job, "explorer")["rollout/model_version"] == [0, 1, 2]
    found = scalars(training.job, "trainer")
    assert found["sample/task_count"] == [4] * 3
    assert found["sample/model_version/min"] == [0, 1, 2]
    assert found["actor/first_ratio_max_deviation"] <= [1e-5] * 3
    assert exploring.remaining() == [] == training.remaining()
