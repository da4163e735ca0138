from types import SimpleNamespace

import pytest

from trinity.common.config import Config
from trinity.common.constants import Mode
from trinity.common.workflows import Task
from trinity.explorer.explorer import EvalTaskset
from trinity.launcher.evaluation_plan import evaluation_lines


def plan(device: str = "cpu", **explorer: object):
    data = {
        "algorithm": {"repeat_times": 8},
        "buffer": {
            "batch_size": 4,
            "explorer_input": {"eval_tasksets": [{"name": "gsm", "path": "x", "split": "test"}]},
        },
        "explorer": explorer,
    }
    return SimpleNamespace(config=Config.model_validate(data), device=device)


def tasks(number: int, repeat_times: int = 1) -> list[EvalTaskset]:
    return [EvalTaskset("gsm", [Task(repeat_times=repeat_times)] * number)]


@pytest.mark.parametrize(
    ("settings", "steps", "is_resumed", "when"),
    [
        ({}, 2, False, "at the start, at the end"),
        ({"eval_interval": 50}, 200, False, "at the start, every 50 steps, at the end"),
        ({"eval_interval": 1}, 200, True, "every step, at the end"),
        ({"eval_interval": 50}, None, True, "every 50 steps, at the end"),
        ({"eval_on_startup": False}, 2, False, "at the end"),
    ],
)
def test_it_is_said_when_evaluations_are_made(settings, steps, is_resumed, when) -> None:
    lines = list(evaluation_lines(plan(**settings), tasks(20), steps, is_resumed))
    assert lines == [f"evaluation: gsm (20 tasks); {when}"]


def test_repeats_are_named() -> None:
    [line] = evaluation_lines(plan(), tasks(20, 4), 2)
    assert line.startswith("evaluation: gsm (20 tasks x 4 samples); ")


def test_on_a_cpu_a_long_evaluation_comes_with_a_way_out() -> None:
    _, hint = evaluation_lines(plan(), tasks(1319), 2)
    assert "as many samples as 41 steps" in hint
    assert "eval_on_startup=false" in hint and "eval_tasksets[0].split=test[:100]'" in hint
    _, resumed = evaluation_lines(plan(), tasks(1319), 2, is_resumed=True)
    assert "eval_on_startup" not in resumed and "Shorter: 'buffer." in resumed
    assert len(list(evaluation_lines(plan("cuda"), tasks(1319), 2))) == 1
    assert len(list(evaluation_lines(plan(), tasks(320), 2))) == 1


def test_a_benchmark_is_not_compared_with_steps_that_it_has_none_of() -> None:
    bench = plan()
    bench.config.mode = Mode.BENCH
    assert list(evaluation_lines(bench, tasks(1319), None)) == [
        "evaluation: gsm (1,319 tasks); for the model itself and each checkpoint"
    ]
    bench.config.explorer.eval_on_startup = False
    bench.config.explorer.bench_on_latest_checkpoint = True
    [line] = evaluation_lines(bench, tasks(1319), None)
    assert line.endswith("for the newest checkpoint")


def test_nothing_is_said_where_nothing_is_evaluated() -> None:
    training = plan()
    training.config.mode = Mode.TRAIN
    assert list(evaluation_lines(training, tasks(20), 2)) == []
    assert list(evaluation_lines(plan(), [], 2)) == []
