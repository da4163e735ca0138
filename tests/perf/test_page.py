"""The page of a performance report, drawn without a browser."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")

from streamlit.testing.v1 import AppTest

from trinity.perf.report import PerfReport


def draw(path: str) -> None:
    from trinity.perf.page import PerfPage

    PerfPage(path).main()


def page(path: Path, steps: int = 2, **changes: Any) -> AppTest:
    meta = {"project": "p", "name": "n", "module": "explorer"}
    report = PerfReport(meta, {"job": "/jobs/n"}, **changes)
    for step in range(1, steps + 1):
        figures = {
            "rollout/response_tokens": 100.0,
            "rollout/experience_count": 4.0,
            "explorer/time/step": 2.0,
        }
        report.listen("explorer", step, figures)
    report.write(path)
    shown = AppTest.from_function(draw, args=(str(path),), default_timeout=300).run()
    assert not shown.exception
    return shown


def test_figures_steps_and_curves(tmp_path: Path) -> None:
    machine = {"cpu_percent": 50.0, "run_cpu_cores": 1.0, "gpus": []}
    engine = {"running": 3.0, "waiting": 5.0}
    samples = [
        {"seconds": 1.0, **machine, "engines": [{}, {}]},
        {"seconds": 2.0, **machine, "engines": [engine, engine]},
    ]
    shown = page(tmp_path / "a.json", samples=samples, state="finished")
    assert [title.value for title in shown.title] == ["p/n: explorer"]
    figures = {metric.label: metric.value for metric in shown.metric}
    assert figures["Tokens a second"] == "50"
    assert figures["Samples a second"] == "2"
    assert figures["Seconds a step"] == "2"
    assert figures["Tokens of a prompt"] == "none"
    [table] = shown.dataframe
    assert list(table.value["step"]) == [1, 2]
    charts = [title.value for title in shown.subheader]
    assert charts[:2] == ["Requests that run", "Requests that wait"]
    assert "KV cache, MB" not in charts and "Processors of the run, cores" in charts
    assert not shown.error and not shown.warning


def test_what_was_0_all_the_time_is_said_not_drawn(tmp_path: Path) -> None:
    machine = {"cpu_percent": 50.0, "run_cpu_cores": 0.0, "gpus": [], "engines": []}
    samples = [{"seconds": seconds, **machine} for seconds in (1.0, 2.0)]
    shown = page(tmp_path / "a.json", samples=samples, state="finished")
    assert [caption.value for caption in shown.caption].count("0 all the time") == 1


def test_what_failed_is_told(tmp_path: Path) -> None:
    gone = {"seconds": 3.0, "engine": 1, "error": "ProcessDied: gone"}
    shown = page(
        tmp_path / "a.json", steps=0, state="timeout", error="too long", engine_failures=[gone]
    )
    assert [error.value for error in shown.error] == ["timeout: too long"]
    assert "ProcessDied: gone" in shown.warning[0].value
    assert "No step" in shown.info[0].value
