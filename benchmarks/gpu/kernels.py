"""Where the GPU's time of a training step goes, kernel by kernel.

    python -m benchmarks.gpu.kernels [--shares] [--max-tokens 16384]

The batch of `train.py --only shared`: 8 samples of 1,024 tokens on prompts of 1,024, 1.5B-shaped.
Prints a table, and the seconds of steps without the profiler.
"""

import argparse
import asyncio
import time

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.common import model_folder
from benchmarks.gpu.train import PPO, batch_of
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.settings import TorchEngineSettings

WARM_STEPS = 3


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=16384)
    args = parser.parse_args()
    engine = TorchTrainEngine(
        TorchEngineSettings(
            model_folder("1.5b"),
            device="cuda",
            micro_batches=MicroBatchRule(max_tokens=args.max_tokens),
            optimizer=OptimizerSettings(lr=1e-6),
            shares_prefixes=args.shares,
            compiles_layers=True,
        )
    )
    await engine.prepare()
    batch = batch_of(8, 8, 1024, 1024, "1.5b")
    seconds = []
    for _ in range(WARM_STEPS + 2):
        start = time.perf_counter()
        await engine.forward_backward(batch, PPO)
        await engine.optim_step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        await engine.forward_backward(batch, PPO)
        await engine.optim_step()
        torch.cuda.synchronize()
    print(f"shares {args.shares}, {args.max_tokens} tokens a pass: {seconds[WARM_STEPS:]} s")
    print(
        found.key_averages().table(
            sort_by="cuda_time_total", row_limit=30, max_name_column_width=90
        )
    )
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
