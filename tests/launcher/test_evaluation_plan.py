from types import SimpleNamespace

import pytest

from trinity.common.config import Config
from trinity.common.constants import Mode
from trinity.common.workflows import Task
from trinity.explorer.explorer import EvalTaskset
from trinity.launcher.evaluation_plan import evaluation_lines
from trinity.launcher.plan import RunPlan, make_plan


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


def test_nothing_is_said_where_nothing_is_evaluated() -> None:
    training = plan()
    training.config.mode = Mode.TRAIN
    assert list(evaluation_lines(training, tasks(20), 2)) == []
    assert list(evaluation_lines(plan(), [], 2)) == []


def cpu_plan(**sections: dict[str, object]) -> RunPlan:
    data = {
        "model": {"model_path": "m", "max_response_tokens": 1024, "max_model_len": 2048},
        "cluster": {"node_num": 1, "gpu_per_node": 0},
        "explorer": {"rollout_model": {"engine_type": "torch"}},
        **sections,
    }
    return make_plan(Config.model_validate(data), found_gpus=0)


@pytest.mark.parametrize(("batch_size", "is_large"), [(4, False), (128, True)])
def test_a_step_that_is_large_for_a_cpu_is_named(batch_size: int, is_large: bool) -> None:
    sections = {"algorithm": {"repeat_times": 8}, "buffer": {"batch_size": batch_size}}
    hint = cpu_plan(**sections).size_hint()
    assert (hint is not None) == is_large


def test_a_processor_without_bfloat16_is_named_where_it_is_computed_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    float32 = {
        "explorer": {"rollout_model": {"engine_type": "torch", "dtype": "float32"}},
        "trainer": {"dtype": "float32"},
    }
    monkeypatch.setattr("trinity.launcher.plan.has_bfloat16", lambda: False)
    [hint] = cpu_plan().hints()
    assert "trainer.dtype=float32 explorer.rollout_model.dtype=float32" in hint
    assert cpu_plan(**float32).hints() == []
    monkeypatch.setattr("trinity.launcher.plan.has_bfloat16", lambda: True)
    assert cpu_plan().hints() == []


def test_an_outside_service_has_no_number_format_in_the_plan() -> None:
    judge = {"engine_type": "openai", "model_path": "judges/big"}
    unnamed = {"engine_type": "openai"}
    explorer = {"rollout_model": {"engine_type": "torch"}, "auxiliary_models": [judge, unnamed]}
    rows = cpu_plan(explorer=explorer)._explorer_rows()
    assert [what for part, what, _ in rows if part == "auxiliary model"] == [
        "openai, big",
        "openai",
    ]
