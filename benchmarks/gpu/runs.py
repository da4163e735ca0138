"""`trinity run` as the benchmarks start it: prompts, command, and what is read off its folder."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NUM_PROMPTS, NUM_SAMPLES, NEW_TOKENS = 64, 8, 256


@dataclass(frozen=True)
class Run:
    """A run that ended well.

    Args:
        step_seconds: Of each training step.
        step_ends: When each was reported, in seconds since the epoch.
        sync_seconds: What new weights took of each step, of the trainer and of the explorer.
    """

    first_step_s: float
    step_seconds: list[float]
    step_ends: list[float]
    sync_seconds: dict[str, list[float]]

    def cycle_s(self, first: int) -> float:
        """Mean seconds from the end of one step to that of the next, from step ``first`` on."""
        ends = self.step_ends[first - 1 :]
        return (ends[-1] - ends[0]) / (len(ends) - 1)


@contextmanager
def run_folder(name: str) -> Iterator[Path]:
    """A folder for a run: kept, with its logs, below ``TRINITY_BENCH_RUNS`` if that is set."""
    kept = os.environ.get("TRINITY_BENCH_RUNS")
    if kept:
        folder = Path(kept) / name
        folder.mkdir(parents=True)
        yield folder
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def write_prompts(path: Path, num_steps: int) -> None:
    """The same prompts in every step."""
    rows = [
        {"question": f"Write a story of a river, a stone and the number {number}."}
        for number in range(NUM_PROMPTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * num_steps))


def trinity_run(folder: Path, model: str, num_steps: int, *overrides: str) -> Run:
    """Run `grpo.yaml` below ``folder``.

    Raises:
        RuntimeError: With the ends of its logs.
    """
    prompts = folder / "prompts.jsonl"
    write_prompts(prompts, num_steps)
    command = [
        *(sys.executable, "-W", "ignore", "-m", "trinity.cli.launcher", "run"),
        *("--config", str(HERE / "grpo.yaml"), "--plugin-dir", str(HERE.parent / "plugins")),
        f"checkpoint_root_dir={folder / 'jobs'}",
        f"model.model_path={model}",
        f"buffer.explorer_input.taskset.path={prompts}",
        f"buffer.total_steps={num_steps}",
        *overrides,
    ]
    screen = folder / "screen.txt"
    with screen.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        logs = [f"{p.name}: {p.read_text()[-1500:]}" for p in folder.rglob("*.log")]
        raise RuntimeError("\n".join([screen.read_text()[-3000:], *logs]))
    [summary] = folder.glob("**/summary.json")
    [stage] = json.loads(summary.read_text())["stages"]
    job = summary.parent
    return Run(
        stage["seconds_to_first_step"],
        stage["step_seconds"],
        [event.wall_time for event in reported(job, "trainer", "time/step")],
        {
            "trainer": [event.value for event in reported(job, "trainer", "time/sync_weight")],
            "explorer": [
                event.value for event in reported(job, "explorer", "explorer/time/sync_weight")
            ],
        },
    )


def reported(job: Path, role: str, metric: str) -> list[Any]:
    """A metric's values in order, as tensorboard has them; none if the run did not report it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = EventAccumulator(str(job / "monitor" / "tensorboard" / role))
    files.Reload()
    return list(files.Scalars(metric)) if metric in files.Tags()["scalars"] else []
