import json
import math
import time
from pathlib import Path

import pytest

from trinity.launcher.summary import RunSummary, StageRecorder, StageSummary, main_score


def recorder(mode: str = "both") -> StageRecorder:
    return StageRecorder(StageSummary("run", "grpo", mode), time.time() - 2)


def test_a_run_of_both_sides() -> None:
    now = time.time()
    record = recorder()
    record.report("eval", 0, {"eval/gsm/accuracy/mean@1": 0.25, "time/eval": 3.0})
    for step in range(1, 8):
        rollout = {
            "rollout/reward/mean": float(step),
            "rollout/experience_count": 4.0,
            "rollout/response_tokens": 40.0,
            "rollout/failed_task_count": 1.0,
        }
        record.report("explorer", step, rollout)
        record.report("trainer", step, {"time/step": 0.5, "actor/final_loss": 1 / step})
    record.report("eval", 7, {"eval/gsm/accuracy/mean@1": 0.5})
    found = record.summary
    assert (found.steps, found.samples, found.tokens, found.failed_tasks) == (7, 28, 280, 7)
    assert (found.reward_first, found.reward_last_5) == (1.0, 5.0)
    assert found.losses == [1 / step for step in range(1, 8)]
    assert found.seconds_training == 3.5
    assert found.samples_per_second == 8.0 and found.tokens_per_second == 80.0
    assert 2 <= found.seconds_to_first_step <= 2 + time.time() - now
    assert found.eval_before == {"eval/gsm/accuracy/mean@1": 0.25}
    assert found.eval_after == {"eval/gsm/accuracy/mean@1": 0.5}
    assert list(found.evals) == ["0", "7"]


def test_a_stage_that_reported_nothing_took_its_time_all_the_same() -> None:
    record = recorder()
    time.sleep(0.05)
    record.end()
    assert record.summary.seconds >= 0.05 and record.summary.samples_per_second == 0


def test_training_alone_counts_what_it_trains() -> None:
    record = recorder("train")
    counts = {"sample/experience_count": 8.0, "sample/trained_tokens": 80.0, "time/step": 1.0}
    record.report("trainer", 1, counts)
    assert (record.summary.samples, record.summary.tokens, record.summary.steps) == (8, 80, 1)


def test_exploring_alone_counts_its_steps() -> None:
    now = time.time()
    record = StageRecorder(StageSummary("run", "grpo", "explore"), now - 30)
    found = record.summary
    for step, seconds in ((1, 6.0), (2, 2.0)):
        rollout = {"rollout/experience_count": 2.0, "rollout/response_tokens": 20.0}
        record.report("explorer", step, rollout)
        record.report("explorer", step, {"explorer/time/step": seconds})
    record.report("eval", 2, {"eval/gsm/accuracy/mean@1": 0.5})
    record.report("explorer", 3, {"rollout/experience_count": 2.0})  # a step without an end
    assert (found.steps, found.samples, found.step_seconds) == (3, 6, [6, 2])
    assert (found.samples_per_second, found.tokens_per_second) == (4 / 8, 40 / 8)
    started = RunSummary("p", "n", "/job", [found]).seconds_starting
    assert 30 - 6 <= started <= 30 - 6 + time.time() - now


def test_the_largest_deviation_of_the_ratio_stays() -> None:
    record = recorder()
    for step, deviation in enumerate((0.0, 1e-3, 1e-6), 1):
        record.report("trainer", step, {"actor/first_ratio_max_deviation": deviation})
    assert record.summary.max_ratio_deviation == 1e-3
    assert recorder().summary.max_ratio_deviation is None


def test_the_file_is_json_for_everybody(tmp_path: Path) -> None:
    stage = StageSummary("run", "sft", "train", losses=[1.0, math.nan], eval_after={"a": math.inf})
    RunSummary("p", "n", str(tmp_path), [stage], status="finished").write(tmp_path)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    found = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert found["status"] == "finished"
    assert found["stages"][0]["losses"] == [1.0, None]
    assert found["stages"][0]["eval_after"] == {"a": None}


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ({}, None),
        ({"finished_task_count": 3.0}, None),
        ({"eval/a/x/mean@1": 1.0}, ("eval/a/x/mean@1", 1.0)),
        (
            {"eval/a/reward/mean@4": 1.0, "eval/a/accuracy/mean@4": 2.0},
            ("eval/a/accuracy/mean@4", 2.0),
        ),
        (
            {"eval/a/format_reward/mean@1": 1.0, "eval/a/reward/mean@1": 2.0},
            ("eval/a/reward/mean@1", 2.0),
        ),
    ],
)
def test_main_score(scores: dict[str, float], wanted: tuple[str, float] | None) -> None:
    assert main_score(scores) == wanted
