"""What the plan of a run says on the screen."""

import io

import pytest
from rich.console import Console

from trinity.common.config import Config
from trinity.launcher.plan import RunPlan, make_plan
from trinity.launcher.plan_text import _table, show_plan, speed_hints
from trinity.launcher.screen import Screen

MODEL = {"model_path": "m", "max_response_tokens": 1024, "max_model_len": 2048}


def cpu_plan(**sections: object) -> RunPlan:
    data = {
        "model": MODEL,
        "cluster": {"node_num": 1, "gpu_per_node": 0},
        "explorer": {"rollout_model": {"engine_type": "torch"}},
        **sections,
    }
    return make_plan(Config.model_validate(data), found_gpus=0)


@pytest.mark.parametrize(("batch_size", "is_large"), [(4, False), (128, True)])
def test_a_step_that_is_large_for_a_cpu_is_named(batch_size: int, is_large: bool) -> None:
    sections = {"algorithm": {"repeat_times": 8}, "buffer": {"batch_size": batch_size}}
    hints = speed_hints(cpu_plan(**sections))
    assert any("ten minutes" in hint for hint in hints) == is_large


def test_a_processor_without_bfloat16_is_named_where_it_is_computed_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    float32 = {
        "explorer": {"rollout_model": {"engine_type": "torch", "dtype": "float32"}},
        "trainer": {"dtype": "float32"},
    }
    monkeypatch.setattr("trinity.launcher.plan_text.has_bfloat16", lambda: False)
    assert speed_hints(cpu_plan(model={**MODEL, "tinker": {"enable": True}})) == []
    [hint] = speed_hints(cpu_plan())
    assert "trainer.dtype=float32 explorer.rollout_model.dtype=float32" in hint
    assert speed_hints(cpu_plan(**float32)) == []
    [hint] = speed_hints(cpu_plan(**{**float32, "trainer": {"dtype": "bfloat16"}}))
    assert hint.endswith("faster: trainer.dtype=float32.")
    outside = {"external_model": {"enable": True, "model_name": "x"}}
    assert speed_hints(cpu_plan(mode="bench", model={**MODEL, **outside})) == []
    monkeypatch.setattr("trinity.launcher.plan_text.has_bfloat16", lambda: True)
    assert speed_hints(cpu_plan()) == []


def test_a_benchmark_has_no_step_to_tell_of() -> None:
    def shown(mode: str, **sections: object) -> str:
        output = io.StringIO()
        show_plan(cpu_plan(mode=mode, **sections), Screen(Console(file=output, width=200)))
        return output.getvalue()

    assert "at most 1,024 new tokens a reply" in shown("explore")
    one = {**MODEL, "max_response_tokens": 1}
    assert "at most 1 new token a reply" in shown("explore", model=one)
    assert "a step:" not in shown("bench")


def test_a_model_that_is_served_has_users_and_no_workflows() -> None:
    plan = cpu_plan(mode="serve", buffer={"train_batch_size": 16})
    assert ("API", "127.0.0.1:8010", "CPU") in rows_of(plan)
    assert "workflows" not in [part for part, *_ in rows_of(plan)]
    output = io.StringIO()
    show_plan(plan, Screen(Console(file=output, width=200)))
    assert "a commit of up to 16 replies" in output.getvalue()


def test_an_outside_service_has_no_number_format_in_the_plan() -> None:
    judge = {"engine_type": "openai", "model_path": "judges/big"}
    unnamed = {"engine_type": "openai"}
    explorer = {"rollout_model": {"engine_type": "torch"}, "auxiliary_models": [judge, unnamed]}
    rows = rows_of(cpu_plan(explorer=explorer))
    assert [what for part, what, _ in rows if part == "auxiliary model"] == [
        "openai, big",
        "openai",
    ]


def test_a_trainer_that_shares_its_gpus_says_so() -> None:
    data = {
        "mode": "colocate",
        "model": {"model_path": "m", "max_model_len": 2048},
        "cluster": {"node_num": 1, "gpu_per_node": 2},
        "explorer": {"rollout_model": {"engine_num": 2}},
    }
    rows = rows_of(make_plan(Config.model_validate(data), found_gpus=2))
    places = {part: place for part, _, place in rows}
    assert places["engine"] == "2 GPUs"
    assert places["trainer"] == "2 GPUs, in turns with the engine"


def rows_of(plan: RunPlan) -> list[tuple[object, ...]]:
    return list(zip(*(column.cells for column in _table(plan).columns), strict=True))


def test_a_step_of_tasksets_with_other_numbers_of_samples_is_a_span() -> None:
    tasksets = [{"path": "/a", "repeat_times": 4}, {"path": "/b", "repeat_times": 16}]
    output = io.StringIO()
    plan = cpu_plan(buffer={"batch_size": 100, "explorer_input": {"tasksets": tasksets}})
    show_plan(plan, Screen(Console(file=output, width=200)))
    assert "a step: 100 prompts x 4 to 16 samples = 400 to 1,600, at most" in output.getvalue()
