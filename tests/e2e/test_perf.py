"""`trinity perf run`: the explorer of a run by itself, measured."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Start
from tests.e2e.toy import Toy
from trinity.perf.report import read_report


@pytest.mark.long
def test_the_explorer_is_measured_and_the_job_is_left_alone(
    toy: Toy, start: Start, tmp_path: Path
) -> None:
    config = toy.config(tmp_path)
    path = tmp_path / "perf" / "output.json"
    options = ["-o", str(path), "--total-steps", "3", "--monitor-interval", "0.2"]
    run = start(config, *options, command="perf run").succeed()
    report = read_report(path)
    assert report["status"] == {"state": "finished", "error": None}
    assert report["timing"]["steps"] == 3
    rates = report["throughput"]
    assert rates["samples"] == 3 * 4 * 4
    assert 0 < rates["response_tokens"] <= rates["samples"] * 8
    assert rates["tokens_per_second"] > 0 and rates["response_length"]["max"] <= 8
    assert rates["prompt_length"]["min"] > 0
    assert any(sample["engines"][0].get("tokens") for sample in report["resource_timeline"])
    assert not any(report["failures"].values())
    assert not run.job.exists() and (tmp_path / "perf" / "jobs" / "toy" / "job").is_dir()
    assert run.remaining() == []


@pytest.mark.long
def test_time_is_up(toy: Toy, start: Start, tmp_path: Path) -> None:
    slow = {"reward_fn_args": {"seconds": 1000}}
    config = toy.config(tmp_path, buffer__explorer_input__taskset=slow)
    path = tmp_path / "output.json"
    run = start(config, "-o", str(path), "--timeout", "60", command="perf run")
    assert run.wait() == 1
    assert "Ended by --timeout after 60 s; 0 of 5 steps were done." in run.last_lines
    report = read_report(path)
    assert report["status"]["state"] == "timeout"
    assert report["throughput"]["tokens_per_second"] is None
    assert report["resource_timeline"]
    assert run.remaining() == []
