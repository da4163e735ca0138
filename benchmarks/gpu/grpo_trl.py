"""TRL's side of `grpo.py`: a few GRPOTrainer steps on one GPU, timed."""

import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_grpo_trl import arguments, train

ROWS_A_PASS = 32  # 11k tokens, and the logits of them, which TRL keeps whole
WITH_VLLM: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.25,
    "vllm_max_model_length": 512,
    "vllm_enable_sleep_mode": False,
    "generation_kwargs": {"ignore_eos": True},
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sampler", choices=["vllm", "own"], required=True)
    parser.add_argument("--wait-for", type=Path, required=True, help="there once the GPU is free")
    options = parser.parse_args()
    sampling: dict[str, Any] = {}
    if options.sampler == "vllm":
        import vllm  # noqa: F401  # what takes time of it, before the GPU is used

        sampling = WITH_VLLM
    while not options.wait_for.exists():
        time.sleep(0.2)
    times = train(options, ROWS_A_PASS, logging_strategy="no", **sampling)
    peak = torch.cuda.max_memory_allocated() / 2**30
    options.out.write_text(json.dumps({"step_seconds": times.step_seconds, "peak_gib": peak}))


if __name__ == "__main__":
    main()
