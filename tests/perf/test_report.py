"""Reports of measured runs: what is counted, what stands in the file, and which runs there are."""

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.common.config.files import BASE, merged, write
from trinity.cli.launcher import app
from trinity.common.config import derive, load_config
from trinity.common.config.check import find_problems
from trinity.common.constants import Mode, StorageType
from trinity.perf.alone import NothingToMeasureError, explorer_alone
from trinity.perf.report import PerfReport, ReportError, read_report, throughput
from trinity.perf.sampler import Machine, Sampler, parse_gpus

FIRST = {
    "rollout/response_tokens": 30.0,
    "rollout/experience_count": 3.0,
    "rollout/prompt_length/mean": 4.0,
    "rollout/prompt_length/max": 5.0,
    "rollout/prompt_length/min": 3.0,
    "rollout/failed_run_count": 2.0,
    "rollout/reward/mean": float("nan"),
}
SECOND = {
    **FIRST,
    "rollout/response_tokens": 90.0,
    "rollout/experience_count": 1.0,
    "rollout/prompt_length/mean": 8.0,
    "rollout/prompt_length/max": 8.0,
}


class Engine:
    """Starts at its second question, and is dead from the fourth on."""

    def __init__(self) -> None:
        self.asked = 0

    async def health(self) -> dict[str, float]:
        self.asked += 1
        if self.asked == 1:
            raise RuntimeError("The engine is not ready: await prepare() first.")
        if self.asked >= 4:
            raise ConnectionError("gone")
        return {"running": float(self.asked), "waiting": 0.0}


def report(tmp_path: Path) -> dict:
    made = PerfReport({"module": "explorer"}, {"job": "/jobs/a"}, time.time() - 10)
    for step, (rollout, seconds) in enumerate([(FIRST, 6.0), (SECOND, 2.0)], start=1):
        made.listen("explorer", step, rollout)
        made.listen("explorer", step, {"explorer/time/step": seconds})
    made.listen("eval", 2, {"eval/a/mean@1": 1.0})
    made.listen("explorer", 3, FIRST)  # not whole
    made.state = "finished"
    made.write(tmp_path / "new" / "output.json")
    return read_report(tmp_path / "new" / "output.json")


def test_rates_are_those_of_whole_steps(tmp_path: Path) -> None:
    now = time.time()
    found = report(tmp_path)
    assert {"run_meta", "timing", "resource_timeline", "step_metrics", "artifacts", "status"} <= (
        found.keys()
    )
    rates = found["throughput"]
    assert (rates["response_tokens"], rates["samples"]) == (120, 4)
    assert rates["tokens_per_second"] == 120 / 8
    assert rates["samples_per_second"] == 4 / 8
    assert (rates["tokens_per_second_later"], rates["samples_per_second_later"]) == (45, 0.5)
    assert rates["prompt_length"] == {"mean": (3 * 4 + 8) / 4, "max": 8, "min": 3}
    assert rates["response_length"]["mean"] is None
    timing = found["timing"]
    assert timing["steps"] == 2 and timing["step_s"] == [6, 2] and timing["step_s_mean"] == 4
    took_s = time.time() - now
    assert 4 <= timing["start_s"] <= 4 + took_s and 10 <= timing["total_s"] <= 10 + took_s
    assert found["failures"]["runs"] == 6
    assert [row["step"] for row in found["step_metrics"]] == [1, 2, 3]
    assert found["step_metrics"][0]["rollout/reward/mean"] is None
    assert "eval/a/mean@1" not in found["step_metrics"][1]


def test_without_a_step_there_is_no_rate() -> None:
    rates = throughput([])
    assert rates["tokens_per_second"] is None and rates["samples"] == 0
    assert PerfReport({}, {}).as_dict()["timing"]["start_s"] is None


def test_what_is_no_report_is_told(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for text, message in (("{}", "no report of"), ("nonsense", "is no report: ")):
        other.write_text(text)
        with pytest.raises(ReportError, match=message):
            read_report(other)
    with pytest.raises(ReportError, match="There is no report"):
        read_report(tmp_path / "none.json")


def test_engines_are_looked_at_while_they_live() -> None:
    async def watch() -> Sampler:
        sampler = Sampler([Engine()], every_s=0.02, started=time.time())
        task = asyncio.create_task(sampler.watch())
        while len(sampler.samples) < 5:
            await asyncio.sleep(0.01)
        task.cancel()
        return sampler

    sampler = asyncio.run(watch())
    engines = [sample["engines"] for sample in sampler.samples[:4]]
    assert [bool(figures) for [figures] in engines] == [False, True, True, False]
    assert engines[1] == [{"running": 2.0, "waiting": 0.0}]
    failure = sampler.failures[0]
    assert failure["engine"] == 0 and failure["error"] == "ConnectionError: gone"
    seconds = [sample["seconds"] for sample in sampler.samples]
    assert seconds == sorted(seconds) and sampler.samples[0]["run_memory_mb"] > 10


def test_use_of_processors_is_that_since_the_last_look() -> None:
    machine = Machine()

    def seconds_of(work: Callable[[], None]) -> float:
        """Seconds of processor time, however many of them a busy machine gives at a time."""
        began = time.monotonic()
        work()
        return machine.sample()["run_cpu_cores"] * (time.monotonic() - began)

    def compute() -> None:
        end = time.process_time() + 1
        while time.process_time() < end:
            os.getpid()

    assert seconds_of(compute) > 0.9
    idle = [seconds_of(lambda: time.sleep(0.1)) for _ in range(9)]
    assert min(idle) < 0.5  # a pause of the machine counts in one of them
    assert machine.sample()["machine_memory_mb"] > 0


def test_use_of_the_whole_machine_is_known_at_the_first_look_of_any_thread() -> None:
    """psutil counts by thread, and looks are taken by whichever thread is free."""
    machine = Machine()
    end = time.process_time() + 0.5
    while time.process_time() < end:
        os.getpid()
    assert asyncio.run(asyncio.to_thread(machine.sample))["cpu_percent"] > 0


def test_lines_of_the_driver() -> None:
    assert parse_gpus("87, 1024, 81559\n[N/A], 5, 81559\n") == [
        {"utilization_percent": 87, "memory_mb": 1024, "memory_total_mb": 81559},
        {"memory_mb": 5, "memory_total_mb": 81559},
    ]
    assert parse_gpus("") == []


def test_the_explorer_alone_touches_nothing_of_the_job(tmp_path: Path) -> None:
    own = {
        "checkpoint_root_dir": "/data/jobs",
        "ray_namespace": "mine",
        "mode": "both",
        "monitor": {"monitor_type": "wandb"},
        "synchronizer": {"sync_method": "nccl", "sync_style": "fixed", "delta": True},
        "buffer": {
            "explorer_input": {"eval_tasksets": [{"name": "e", "path": "/data/e"}]},
            "trainer_input": {"experience_buffer": {"path": "sqlite:////data/mine.db"}},
        },
        "data_processor": {"experience_pipeline": {"input_save_path": "/data/mine.jsonl"}},
    }
    loaded = load_config(write(tmp_path, merged(BASE, own)))
    alone = explorer_alone(loaded, tmp_path / "perf", 7)
    assert loaded.mode is Mode.BOTH and loaded.buffer.total_steps is None
    assert alone.mode is Mode.EXPLORE and alone.buffer.total_steps == 7
    assert find_problems(alone) == []
    filled = derive(alone).config
    text = json.dumps(filled.model_dump(mode="json"))
    assert "/data/mine" not in text and "/data/jobs" not in text and '"mine"' not in text
    buffer = filled.buffer.trainer_input.experience_buffer
    assert buffer.storage_type is StorageType.SQL and str(tmp_path) in buffer.path
    assert filled.monitor.monitor_type == "tensorboard"
    assert filled.buffer.explorer_input.eval_tasksets == []
    assert not filled.continue_from_checkpoint


def test_of_stages_the_last_that_explores_is_measured(tmp_path: Path) -> None:
    stages = [
        {"stage_name": "one", "mode": "both", "buffer": {"batch_size": 2}},
        {"stage_name": "two", "mode": "both", "buffer": {"batch_size": 16}},
        {"stage_name": "score", "mode": "bench"},
    ]
    alone = explorer_alone(load_config(write(tmp_path, {**BASE, "stages": stages})), tmp_path, 1)
    assert (alone.name, alone.buffer.batch_size, alone.stages) == ("test/two", 16, [])


@pytest.mark.parametrize("mode", ["train", "bench", "serve"])
def test_a_run_without_rollouts_of_its_own_is_refused(tmp_path: Path, mode: str) -> None:
    loaded = load_config(write(tmp_path, {**BASE, "mode": mode}))
    with pytest.raises(NothingToMeasureError, match=f"this is of mode {mode}"):
        explorer_alone(loaded, tmp_path, 1)


def test_what_the_commands_want(tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        return str(CliRunner().invoke(app, ["perf", *arguments]).exception)

    file = str(write(tmp_path, BASE))
    assert "only explorer" in said("run", "-c", file, "-m", "trainer")
    assert "is a folder" in said("run", "-c", file, "-o", str(tmp_path))
    assert "There is no report" in said("view", "-r", str(tmp_path / "none.json"))
