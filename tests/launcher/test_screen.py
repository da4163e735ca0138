import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from trinity.launcher.screen import Screen, _rate, sparkline
from trinity.launcher.summary import RunSummary, StageSummary


def screen(is_terminal: bool = False) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=120, highlight=False, force_terminal=is_terminal)
    return Screen(console), out


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([2.0, 2.0], "▁▁"),
        ([0.0, 7.0], "▁█"),
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([0.0, math.nan, 7.0], "▁ █"),
        ([math.inf], " "),
        ([-1.7e308, 1.7e308], "▁█"),
    ],
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values) == line


@given(st.lists(st.floats(), max_size=300), st.integers(1, 60))
def test_a_sparkline_fits(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) <= width


def test_plain_lines_end_with_the_last_state() -> None:
    shown, out = screen()
    stage = StageSummary("run", "grpo", "both")
    shown.start_stage("run", stage, total_steps=4)
    for step in (1, 2):
        stage.steps, stage.tokens_per_second = step, 1234.0
        stage.rewards.append(step / 4)
        shown.report("trainer", step, {"time/step": 2.0})
    assert "step 2" not in out.getvalue()
    shown.end_stage()
    shown.end_stage()
    line = "step 2/4   reward 0.500   2.00 s/step   1,234 tokens/s   4 s left"
    assert out.getvalue().splitlines()[-1] == line


def test_a_line_that_says_nothing_new_is_not_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity.launcher.screen._PLAIN_EVERY_S", 0.0)
    shown, out = screen()
    stage = StageSummary("run", "grpo", "both", steps=1, rewards=[0.5])
    shown.start_stage("run", stage, total_steps=1)
    shown.report("trainer", 1, {"time/step": 2.0})
    shown.report("explorer", 1, {})
    shown.end_stage()
    assert out.getvalue().count("step 1/1") == 1


def test_the_first_step_says_little_of_the_others() -> None:
    shown, out = screen()
    stage = StageSummary("run", "sft", "train", losses=[0.5])
    shown.start_stage("run", stage, total_steps=8)
    for step, seconds in ((1, 80.0), (2, 3.0), (3, 5.0)):
        stage.steps = step
        shown.report("trainer", step, {"time/step": seconds})
    shown.end_stage()
    assert "4.00 s/step" in out.getvalue() and " 20 s left" in out.getvalue()


def test_a_narrow_screen_shows_whole_paths() -> None:
    out = io.StringIO()
    shown = Screen(Console(file=out, width=60, highlight=False))
    stage = StageSummary("run", "grpo", "both", steps=2, reward_first=0.25, reward_last_5=0.5)
    stage.eval_before = stage.eval_after = {"a/accuracy/mean@1": 0.75}
    path = "/a" * 60
    shown.final_table(RunSummary("p", "n", "/job", [stage]), [("model", path)])
    assert path in out.getvalue()
    assert "0.750" in out.getvalue() and "0.750 →" not in out.getvalue()


def test_no_time_is_left_after_the_last_step() -> None:
    shown, out = screen()
    stage = StageSummary("run", "sft", "train", steps=8, losses=[0.5])
    shown.start_stage("run", stage, total_steps=8)
    shown.report("trainer", 8, {"time/step": 1.0})
    shown.end_stage()
    assert "loss 0.5000" in out.getvalue() and " 0 s left" in out.getvalue()


def test_more_steps_than_planned_are_told_as_such() -> None:
    shown, out = screen()
    stage = StageSummary("run", "grpo", "both", steps=3, rewards=[0.5])
    shown.start_stage("run", stage, total_steps=2)
    shown.report("trainer", 3, {"time/step": 1.0})
    shown.end_stage()
    assert "step 3 (of 2 planned)   reward 0.500   1.00 s/step" in out.getvalue()
    assert "left" not in out.getvalue()


def test_evaluations_are_said_at_once() -> None:
    shown, out = screen()
    shown.start_stage("run", StageSummary("run", "grpo", "both"), None)
    shown.report("eval", 0, {"eval/gsm/accuracy/mean@4": 0.25, "time/eval": 1.0})
    shown.report("eval", 5, {"time/eval": 1.0})
    assert out.getvalue().splitlines()[1:] == ["eval at step 0: gsm/accuracy/mean@4 = 0.250"]


def test_a_benchmark_says_of_which_weights_a_score_is() -> None:
    shown, out = screen()
    shown.start_stage("look", StageSummary("look", None, "bench"), None)
    for step in (0, 4):
        shown.report("bench", step, {"bench/gsm/accuracy/mean@1": 0.25})
    assert out.getvalue().splitlines()[1:] == [
        "bench of the model itself: gsm/accuracy/mean@1 = 0.250",
        "bench at step 4: gsm/accuracy/mean@1 = 0.250",
    ]


def test_a_terminal_gets_a_live_display() -> None:
    shown, out = screen(is_terminal=True)
    stage = StageSummary("run", "grpo", "both")
    shown.start_stage("run", stage, total_steps=3)
    assert "starting: models, engines and runners" in out.getvalue()
    stage.steps, stage.rewards = 2, [0.0, math.nan, 1.0]
    shown.report("trainer", 2, {"time/step": 0.5})
    shown.end_stage()
    assert "step 2/3" in out.getvalue() and "0.000 → 1.000" in out.getvalue()


def test_what_is_under_way_takes_the_place_of_the_start() -> None:
    shown, out = screen(is_terminal=True)
    shown.start_stage("run", StageSummary("run", "grpo", "both"), total_steps=3)
    shown.progress("evaluating gsm: 3 of 9 samples", False)
    begun = out.tell()
    shown.end_stage()
    last = out.getvalue()[begun:]
    assert "evaluating gsm: 3 of 9 samples" in last and "starting" not in last


def test_in_a_pipe_only_lines_that_stay_are_said() -> None:
    shown, out = screen()
    shown.start_stage("run", StageSummary("run", "grpo", "both"), total_steps=3)
    for done, is_to_stay in ((1, False), (2, True), (3, False)):
        shown.progress(f"{done} of 9", is_to_stay)
    shown.progress("", False)
    assert out.getvalue().splitlines()[1:] == ["2 of 9"]


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, ""), (0.034, "0.034"), (3.25, "3.2"), (337.81, "337.8")]
)
def test_a_slow_rate_is_not_shown_as_none(value: float, shown: str) -> None:
    assert _rate(value) == shown


def test_names_are_shown_as_they_are() -> None:
    shown, out = screen()
    shown.say("[bold]x[/bold]")
    stage = StageSummary("[warm]", "sft", "train", steps=2, seconds=61, samples_per_second=3.25)
    stage.eval_before, stage.eval_after = {"a/accuracy/mean@1": 0.1}, {"a/accuracy/mean@1": 0.9}
    stage.reward_first, stage.reward_last_5 = 0.0, 0.5
    stage.seconds_to_first_step, stage.step_seconds = 9.0, [2.0, 1.0]
    skipped = StageSummary("first", "sft", "train", is_skipped=True)
    bench = StageSummary("last", None, "bench")
    stages = [skipped, stage, bench]
    summary = RunSummary("p", "[n]", "/job", stages, seconds=125, peak_memory_mb=1500)
    shown.final_table(summary, [("job", "/jobs/[n]")])
    text = out.getvalue()
    for wanted in ("[bold]x[/bold]", "p/[n]: running", "[warm] (sft)", "/jobs/[n]", "done before"):
        assert wanted in text, wanted
    assert "2 min 5 s, 7 s of it before the first step" in text
    for wanted in ("0.100", "0.900", "0.000 → 0.500", "3.2", "61 s", "last (bench)", "1,500 MB"):
        assert wanted in text, wanted
