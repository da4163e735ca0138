"""A GRPO step on a CPU: `trinity run` against TRL's GRPOTrainer, same model, prompts and reward.

    python benchmarks/cpu_grpo.py --model examples/demo_llm/model --trl-python /path/to/trl/python

``--trl-python`` is an interpreter with trl 1.16, accelerate and CPU PyTorch. Both take 8 prompts
x 8 samples of at most 64 new tokens in bfloat16, one update a step, no reference model. The first
step of each is left out of the times. Memory is the sum over all processes, shared pages once.
The last line printed is the result as JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from trinity.launcher.memory_watch import MemoryWatch

HERE = Path(__file__).parent
NUM_PROMPTS, NUM_SAMPLES, NEW_TOKENS = 8, 8, 64
WORDS = ["river", "garden", "window", "market", "winter", "letter", "mountain", "bridge"]


@dataclass(frozen=True)
class Result:
    """What one contender needed."""

    step_seconds: float
    first_step_s: float
    peak_mb: float

    @property
    def samples_per_second(self) -> float:
        return NUM_PROMPTS * NUM_SAMPLES / self.step_seconds


def run_watched(command: list[str], log: Path) -> float:
    """Run ``command``, its output in ``log``; the peak memory in MB."""
    print(f"  {' '.join(command)}", flush=True)
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        with MemoryWatch(process.pid) as memory:
            code = process.wait()
    if code:
        sys.exit(f"{command[0]} ended with exit code {code}; its last lines:\n{_tail(log)}")
    return memory.peak_mb


def _tail(log: Path, num_lines: int = 20) -> str:
    return "\n".join(log.read_text().splitlines()[-num_lines:])


def after_first(seconds: list[float]) -> float:
    return sum(seconds[1:]) / len(seconds[1:])


def write_prompts(path: Path, num_steps: int) -> None:
    """The same eight prompts for every step."""
    rows = [{"question": f'Write a short story with the word "{word}".'} for word in WORDS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * num_steps))


def with_trinity(model: Path, prompts: Path, num_steps: int, folder: Path) -> Result:
    command = [
        *(sys.executable, "-m", "trinity.cli.launcher", "run"),
        *("--config", str(HERE / "cpu_grpo.yaml")),
        *("--plugin-dir", str(HERE / "plugins")),
        f"checkpoint_root_dir={folder}",
        f"model.model_path={model}",
        f"buffer.explorer_input.taskset.path={prompts}",
        f"buffer.total_steps={num_steps}",
    ]
    peak_mb = run_watched(command, folder / "trinity.log")
    [summary] = folder.glob("**/summary.json")
    [stage] = json.loads(summary.read_text())["stages"]
    return Result(after_first(stage["step_seconds"]), stage["seconds_to_first_step"], peak_mb)


def with_trl(python: str, model: Path, prompts: Path, num_steps: int, folder: Path) -> Result:
    command = [
        *(python, str(HERE / "cpu_grpo_trl.py")),
        *("--model", str(model), "--prompts", str(prompts), "--steps", str(num_steps)),
        *("--num-samples", str(NUM_SAMPLES), "--new-tokens", str(NEW_TOKENS)),
        *("--out", str(folder / "trl.json")),
    ]
    peak_mb = run_watched(command, folder / "trl.log")
    times = json.loads((folder / "trl.json").read_text())
    return Result(after_first(times["step_seconds"]), times["seconds_to_first_step"], peak_mb)


def report(contenders: dict[str, Result]) -> dict[str, float]:
    figures = {
        f"{name}_{key}": round(value, 3)
        for name, result in contenders.items()
        for key, value in (
            ("samples_per_second", result.samples_per_second),
            ("step_seconds", result.step_seconds),
            ("seconds_to_first_step", result.first_step_s),
            ("peak_memory_mb", result.peak_mb),
        )
    }
    if {"trinity", "trl"} <= contenders.keys():
        ours, theirs = contenders["trinity"], contenders["trl"]
        figures["times_trl"] = round(ours.samples_per_second / theirs.samples_per_second, 3)
        figures["memory_of_trl"] = round(ours.peak_mb / theirs.peak_mb, 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--trl-python", help="without it, trinity alone is measured")
    parser.add_argument("--steps", type=int, default=4, help="steps of each, at least 2")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first step is left out")
    model = options.model.resolve()
    contenders = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prompts = folder / "prompts.jsonl"
        write_prompts(prompts, options.steps)
        contenders["trinity"] = with_trinity(model, prompts, options.steps, folder)
        if options.trl_python:
            contenders["trl"] = with_trl(options.trl_python, model, prompts, options.steps, folder)
    print(json.dumps(report(contenders)))


if __name__ == "__main__":
    main()
