"""`trinity run` with weights by NCCL: seconds of a step and how long each GPU is idle.

    python -m benchmarks.gpu.overlap --tokenizer FOLDER [--gpus 2] [--engines 1] [--shape 1.5b]

GRPO of a 0.5B-shaped model with steps in turn (`sync_offset: 0`) and one step apart (1), the first
steps left out. A GPU is idle while the driver counts no kernel as running on it. What a sync takes
of a long step: `--shape 1.5b`, with more tokens by the configuration's own keys.
"""

import argparse
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.gpu.common import SHAPES, model_folder, visible_gpus, write
from benchmarks.gpu.runs import NUM_PROMPTS, NUM_SAMPLES, run_folder, trinity_run

WARM_STEPS = 4
_SAMPLE_EVERY_S = 0.05


class IdleWatch:
    """How busy GPUs are, sampled in a thread while a block runs."""

    def __init__(self, gpus: Sequence[int]) -> None:
        self._gpus = gpus
        self._is_over = threading.Event()
        self._samples: list[tuple[float, list[int]]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def _watch(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in self._gpus]
        while not self._is_over.wait(_SAMPLE_EVERY_S):
            used = [int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) for handle in handles]
            self._samples.append((time.time(), used))

    def idle_shares(self, start: float, end: float) -> list[float]:
        """Of each GPU, between two times."""
        found = [used for when, used in self._samples if start <= when <= end]
        return [1 - sum(used) / 100 / len(found) for used in zip(*found, strict=True)]


def one_run(args: argparse.Namespace, offset: int, gpus: list[int]) -> dict[str, object]:
    watch = IdleWatch(gpus)
    with run_folder(f"overlap_{offset}") as folder, watch.watching():
        run = trinity_run(
            folder,
            model_folder(args.shape, args.tokenizer),
            args.steps,
            "mode=both",
            f"cluster.gpu_per_node={len(gpus)}",
            f"explorer.rollout_model.engine_num={args.engines}",
            "synchronizer.sync_method=nccl",
            f"synchronizer.sync_offset={offset}",
            *args.overrides,
        )
    cycle = run.cycle_s(WARM_STEPS)
    return {
        "sync_offset": offset,
        "seconds_to_first_step": run.first_step_s,
        "cycle_s": cycle,
        "samples_per_second": NUM_PROMPTS * NUM_SAMPLES / cycle,
        "idle_share_of_gpus": watch.idle_shares(run.step_ends[WARM_STEPS - 1], run.step_ends[-1]),
        "step_seconds": run.step_seconds,
        "sync_seconds": run.sync_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--offset", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--shape", default="0.5b", choices=SHAPES)
    parser.add_argument("--name", default="gpu_overlap")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    gpus = [int(gpu) for gpu in visible_gpus()][: args.gpus]
    runs = []
    for offset in args.offset:
        runs.append(one_run(args, offset, gpus))
        write(args.name, {"gpus": len(gpus), "engines": args.engines, "runs": runs})


if __name__ == "__main__":
    main()
