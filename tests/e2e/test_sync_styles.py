"""Every way of exchanging weights comes to its end, and says how old its samples were."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Start
from tests.e2e.test_grpo_run import scalars
from tests.e2e.toy import Toy

LONG = pytest.mark.long


@pytest.mark.parametrize(
    "style",
    [
        pytest.param("explorer_driven", marks=LONG),
        pytest.param("trainer_driven", marks=LONG),
        "fully_async",
    ],
)
def test_a_free_style_runs_to_its_end(toy: Toy, start: Start, tmp_path: Path, style: str) -> None:
    config = toy.config(
        tmp_path,
        buffer__total_steps=4,
        synchronizer__sync_style=style,
        synchronizer__sync_timeout=400,
    )
    run = start(config).succeed()
    assert run.summary["stages"][0]["steps"] == 4
    assert scalars(run.job, "explorer")["rollout/experience_count"] == [16] * 4
    assert scalars(run.job, "trainer")["sample/task_count"] == [4] * 4


@pytest.mark.parametrize("method", ["memory", pytest.param("checkpoint", marks=LONG)])
def test_an_explorer_one_step_ahead(toy: Toy, start: Start, tmp_path: Path, method: str) -> None:
    config = toy.config(
        tmp_path,
        buffer__total_steps=4,
        synchronizer__sync_method=method,
        synchronizer__sync_offset=1,
    )
    run = start(config).succeed()
    assert scalars(run.job, "explorer")["rollout/model_version"] == [0, 0, 1, 2]
    found = scalars(run.job, "trainer")
    assert found["sample/model_version/min"] == [0, 0, 1, 2]
    assert found["sample/model_version_drift/max"] == [0, 1, 1, 1]
