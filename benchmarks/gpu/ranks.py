"""Two trainer ranks beside one: the same loss and gradient norm, and how much faster.

    python -m benchmarks.gpu.ranks

FSDP2 over the GPUs that are here, a 0.6B-shaped model in bf16; ranks are processes as in a run.
With `--profile` where the time of the last step goes lies beside the results, as
ranks_profile_<rank>.txt; that step takes 15 s then.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.common import RESULTS, model_folder, write
from benchmarks.gpu.train import PPO, batch_of
from benchmarks.gpu.turns import my_turn
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.rank import TorchTrainRank
from trinity.trainer.backends.torch.rank_group import RankGroup
from trinity.trainer.backends.torch.settings import TorchEngineSettings
from trinity.trainer.backends.torch.sharding import RankSettings
from trinity.trainer.backends.torch.updates import Share
from trinity.trainer.batch import TrainBatch
from trinity.trainer.engine import TrainEngine
from trinity.utils import actor

NAMESPACE = "benchmark"
NUM_STEPS = 8
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Steps:
    """Steps of one trainer on one batch.

    Args:
        figures: Loss and gradient norm of each.
        seconds: The median of a step, the first two left out.
        each: Seconds of each step.
        peak_gib: The most that tensors took of the GPU of any rank.
    """

    figures: list[tuple[float, float]]
    seconds: float
    each: list[float]
    peak_gib: float

    def norm_difference(self, other: "Steps", until: int | None = None) -> float:
        """The largest relative one between the gradient norms of the first steps."""
        pairs = zip(self.figures[:until], other.figures[:until], strict=True)
        return max(abs(a[1] - b[1]) / b[1] for a, b in pairs)

    def loss_difference(self, other: "Steps", until: int | None = None) -> float:
        """The largest one between the losses of the first steps."""
        pairs = zip(self.figures[:until], other.figures[:until], strict=True)
        return max(abs(a[0] - b[0]) for a, b in pairs)


class ProfiledRank(TorchTrainRank):
    """Writes down where the time of one late pass goes."""

    _num_passes = 0

    def _backward(self, *args: Any) -> Share:
        self._num_passes += 1
        if self._num_passes < NUM_STEPS:
            return super()._backward(*args)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            share = super()._backward(*args)
            torch.cuda.synchronize()
        tables = [
            found.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=80)
            for key in ("cuda_time_total", "self_cpu_time_total")
        ]
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"ranks_profile_{self._rank.rank}.txt").write_text("\n".join(tables))
        return share


def a_batch() -> TrainBatch:
    return batch_of(8, 4, 512, 512, "0.6b")


async def steps(engine: TrainEngine, num_steps: int) -> Steps:
    """Steps on the same rows."""
    await engine.prepare()
    batch = a_batch()
    figures, seconds = [], []
    async with my_turn("steps"):
        for _ in range(num_steps):
            start = time.perf_counter()
            metrics = await engine.forward_backward(batch, PPO)
            metrics |= await engine.optim_step()
            seconds.append(time.perf_counter() - start)
            figures.append((metrics["actor/final_loss"], metrics["actor/grad_norm"]))
    peak_gib = (await engine.health())["peak_gpu_memory_mb"] / 1024
    await engine.close()
    return Steps(figures, statistics.median(seconds[2:]), seconds, peak_gib)


def settings_of() -> TorchEngineSettings:
    return TorchEngineSettings(
        model_folder("0.6b"),
        device="cuda",
        micro_batches=MicroBatchRule(max_tokens=8192),
        optimizer=OptimizerSettings(lr=1e-5),
    )


def placed() -> dict[str, Any]:
    """Where a process of one GPU goes."""
    environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return {"namespace": NAMESPACE, "num_gpus": 1, "env_vars": environment}


async def alone(num_steps: int) -> Steps:
    """The torch trainer on one GPU."""
    engine = actor.spawn(TorchTrainEngine, settings_of(), None, name="alone", **placed())
    try:
        return await steps(engine, num_steps)
    finally:
        actor.kill(engine)


async def in_ranks(
    kind: type, settings: TorchEngineSettings, num_ranks: int, num_steps: int
) -> Steps:
    """A trainer of several processes, each with a GPU of its own."""
    ranks: list[Any] = [
        actor.spawn(
            *(kind, settings, None, RankSettings(n, num_ranks)),
            name=f"{next(_NUMBERS)}_{n}",
            **placed(),
        )
        for n in range(num_ranks)
    ]
    try:
        return await steps(RankGroup(ranks, settings), num_steps)
    finally:
        for rank in ranks:
            actor.kill(rank)


async def measure(num_ranks: int, profiles: bool) -> dict[str, object]:
    wanted = await alone(NUM_STEPS)
    kind = ProfiledRank if profiles else TorchTrainRank
    found = await in_ranks(kind, settings_of(), num_ranks, NUM_STEPS)
    return {
        "num_ranks": num_ranks,
        "one_rank_loss_and_norm": wanted.figures,
        "ranks_loss_and_norm": found.figures,
        "max_norm_difference": found.norm_difference(wanted),
        "max_loss_difference": found.loss_difference(wanted),
        "speed_up": wanted.seconds / found.seconds,
        "step_s_of_one": wanted.seconds,
        "steps_s_of_one": wanted.each,
        "steps_s_of_ranks": found.each,
    }


def in_cluster(name: str, job: Callable[[], Coroutine[Any, Any, dict[str, object]]]) -> None:
    """Run ``job`` beside a Ray cluster of its own, and write what it gives as ``name``."""
    from trinity.launcher.cluster import ray_cluster

    model_folder("0.6b")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRINITY_LOG_DIR"] = folder
        with ray_cluster("local", NAMESPACE, {"TRINITY_LOG_DIR": folder}):
            write(name, asyncio.run(job()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    in_cluster("gpu_ranks", lambda: measure(min(2, torch.cuda.device_count()), args.profile))
