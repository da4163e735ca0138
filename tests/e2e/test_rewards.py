"""A reward that raises or never returns costs its own samples, and nothing else."""

from pathlib import Path

from tests.e2e.conftest import Start
from tests.e2e.test_grpo_run import scalars
from tests.e2e.toy import Toy


def test_failing_and_hanging_rewards_are_counted_and_named(
    toy: Toy, start: Start, tmp_path: Path
) -> None:
    arguments = {"raises_on": "t1 ", "hangs_on": "t6 ", "timeout_s": 20}
    config = toy.config(tmp_path, buffer__explorer_input__taskset={"reward_fn_args": arguments})
    run = start(config).succeed()
    found = scalars(run.job, "explorer")
    assert found["rollout/dropped_sample_count"] == [4, 4, 0]
    assert found["rollout/experience_count"] == [12, 12, 16]
    assert found["rollout/finished_task_count"] == [3, 3, 4]
    assert found["rollout/failed_task_count"] == [1, 1, 0]
    assert run.summary["stages"][0]["failed_tasks"] == 2
    log = run.log("explorer_runner_0")
    assert "this prompt has no score" in log
    assert "not done after 20 s" in log and "on response" in log
    assert run.remaining() == []


def test_operators_ask_auxiliary_models(toy: Toy, start: Start, tmp_path: Path) -> None:
    judge = {"name": "judge", "model_path": str(toy.model), "engine_type": "torch"}
    config = toy.config(
        tmp_path,
        buffer__total_steps=2,
        explorer__auxiliary_models=[judge],
        data_processor__experience_pipeline={"operators": [{"name": "toy_judged"}]},
    )
    run = start(config).succeed()
    assert min(scalars(run.job, "explorer")["experience_pipeline/judged"]) >= 1
