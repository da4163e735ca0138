"""Two trainer ranks beside one: the same loss and gradient norm, and how much faster.

    python -m benchmarks.gpu.ranks

FSDP2 over the GPUs that are here, a 0.6B-shaped model in bf16; ranks are processes as in a run.
"""

import asyncio
import os
import tempfile
import time
from typing import Any

import torch

from benchmarks.gpu.common import model_folder, write
from benchmarks.gpu.train import PPO, batch_of
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.rank import TorchTrainRank
from trinity.trainer.backends.torch.rank_group import RankGroup
from trinity.trainer.backends.torch.settings import TorchEngineSettings
from trinity.trainer.backends.torch.sharding import RankSettings
from trinity.trainer.engine import TrainEngine
from trinity.utils import actor

NAMESPACE = "benchmark"


async def steps(engine: TrainEngine, num_steps: int) -> tuple[list[tuple[float, float]], float]:
    """Loss and gradient norm of each step, and the seconds of the last."""
    await engine.prepare()
    batch = batch_of(8, 4, 512, 512, "0.6b")
    found = []
    for _ in range(num_steps):
        start = time.perf_counter()
        metrics = await engine.forward_backward(batch, PPO)
        metrics |= await engine.optim_step()
        seconds = time.perf_counter() - start
        found.append((metrics["actor/final_loss"], metrics["actor/grad_norm"]))
    await engine.close()
    return found, seconds


async def measure(num_ranks: int) -> dict[str, object]:
    settings = TorchEngineSettings(
        model_folder("0.6b"),
        device="cuda",
        micro_batches=MicroBatchRule(max_tokens=8192),
        optimizer=OptimizerSettings(lr=1e-5),
    )
    environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    where: dict[str, Any] = {"namespace": NAMESPACE, "num_gpus": 1, "env_vars": environment}
    alone = actor.spawn(TorchTrainEngine, settings, None, name="alone", **where)
    wanted, slow = await steps(alone, 4)
    actor.kill(alone)
    ranks = [
        actor.spawn(
            TorchTrainRank, settings, None, RankSettings(n, num_ranks), name=f"rank_{n}", **where
        )
        for n in range(num_ranks)
    ]
    found, fast = await steps(RankGroup(ranks, settings), 4)
    return {
        "num_ranks": num_ranks,
        "one_rank_loss_and_norm": wanted,
        "ranks_loss_and_norm": found,
        "max_norm_difference": max(
            abs(a[1] - b[1]) / b[1] for a, b in zip(found, wanted, strict=True)
        ),
        "speed_up": slow / fast,
    }


def main() -> None:
    from trinity.launcher.cluster import ray_cluster

    model_folder("0.6b")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRINITY_LOG_DIR"] = folder
        with ray_cluster("local", NAMESPACE, {"TRINITY_LOG_DIR": folder}):
            write("gpu_ranks", asyncio.run(measure(torch.cuda.device_count())))


if __name__ == "__main__":
    main()
