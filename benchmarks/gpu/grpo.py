"""GRPO end to end on one GPU: `trinity run` in `mode: colocate` against TRL's GRPOTrainer.

    python -m benchmarks.gpu.grpo --tokenizer FOLDER

0.5B-shaped model, 64 prompts x 8 samples of 256 tokens a step, one update a step, bf16, no
reference model. TRL samples with vLLM on the same GPU too, or, where that fails, with its own
generation; the result says which. On two GPUs both run at once; on one TRL's program loads its
packages meanwhile, and takes the GPU when ours is done with it.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.gpu.common import RESULTS, model_folder, visible_gpus, write
from benchmarks.gpu.runs import (
    NEW_TOKENS,
    NUM_PROMPTS,
    NUM_SAMPLES,
    run_folder,
    trinity_run,
    write_prompts,
)

WARM_STEPS = {"trinity": 3, "trl": 1}  # ours compiles in its first ones; TRL's are alike
SIDES = ("trinity", "trl")


def with_trinity(model: str, num_steps: int, folder: Path) -> dict[str, object]:
    run = trinity_run(folder, model, num_steps, "mode=colocate")
    cycle = run.cycle_s(WARM_STEPS["trinity"])
    return {
        "step_s": cycle,
        "samples_per_second": NUM_PROMPTS * NUM_SAMPLES / cycle,
        "seconds_to_first_step": run.first_step_s,
        "step_seconds": run.step_seconds,
    }


def with_trl(
    model: str, num_steps: int, folder: Path, gpu: str, is_free: Path
) -> dict[str, object]:
    """With vLLM if that runs, else with TRL's own generation; and why not with vLLM.

    Args:
        is_free: A file that is there once the GPU may be used.
    """
    why = ""
    write_prompts(folder / "prompts.jsonl", num_steps)
    for sampler in ("vllm", "own"):
        out = folder / f"{sampler}.json"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "benchmarks.gpu.grpo_trl"),
                *("--model", model, "--out", str(out)),
                *("--prompts", str(folder / "prompts.jsonl"), "--steps", str(num_steps)),
                *("--num-samples", str(NUM_SAMPLES), "--new-tokens", str(NEW_TOKENS)),
                *("--sampler", sampler, "--wait-for", str(is_free)),
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
        )
        if out.exists():
            found = json.loads(out.read_text())
            seconds = found["step_seconds"][WARM_STEPS["trl"] :]
            mean = sum(seconds) / len(seconds)
            rate = NUM_PROMPTS * NUM_SAMPLES / mean
            own = {"sampler": sampler, "step_s": mean, "samples_per_second": rate}
            return {**found, **own, "why_not_vllm": why}
        why = done.stderr[-1500:]
        (folder / f"{sampler}_errors.txt").write_text(done.stderr)
        print(f"TRL with {sampler} failed: {done.stderr[-3000:]}", flush=True)
    return {"why_not_vllm": why}


def sides_of_today() -> dict[str, dict[str, object]]:
    """What the file of results has of both sides, if it is of today."""
    file = RESULTS / "gpu_grpo.json"
    written = json.loads(file.read_text()) if file.exists() else {}
    if written.get("when") != time.strftime("%Y-%m-%d"):
        return {}
    return {side: written[side] for side in SIDES if side in written}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--steps", type=int, default=6, help="that are measured")
    parser.add_argument("--only", choices=SIDES, help="the other stays as the file of today has it")
    args = parser.parse_args()
    gpus, model = visible_gpus(), model_folder("0.5b", args.tokenizer)
    found: dict[str, dict[str, object]] = {}
    result: dict[str, object] = {"prompts": NUM_PROMPTS, "samples": NUM_SAMPLES}
    result["new_tokens"] = NEW_TOKENS

    def keep() -> None:
        sides = {**(sides_of_today() if args.only else {}), **found}
        own = sides.get("trinity", {}).get("samples_per_second")
        rate = sides.get("trl", {}).get("samples_per_second")
        if isinstance(own, float) and isinstance(rate, float):
            result["times_trl"] = own / rate
        write("gpu_grpo", {**result, **sides})

    def ours(folder: Path, is_free: Path) -> None:
        try:
            num_steps = args.steps + WARM_STEPS["trinity"]
            found["trinity"] = with_trinity(model, num_steps, folder)
            keep()
        finally:
            is_free.touch()

    def theirs(folder: Path, is_free: Path) -> None:
        num_steps = args.steps + WARM_STEPS["trl"]
        found["trl"] = with_trl(model, num_steps, folder, gpus[-1], is_free)
        keep()

    wanted = [args.only] if args.only else list(SIDES)
    with ExitStack() as stack:
        folders = {side: stack.enter_context(run_folder(f"grpo_{side}")) for side in wanted}
        is_free = folders[wanted[0]] / "gpu_is_free"
        if len(gpus) > 1 or args.only == "trl":
            is_free.touch()
        jobs = {"trinity": ours, "trl": theirs}
        threads = [
            threading.Thread(target=jobs[side], args=(folders[side], is_free)) for side in wanted
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
