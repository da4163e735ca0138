"""Two trainer ranks beside one: the same loss and gradient norm, and how much faster.

    python -m benchmarks.gpu.ranks

FSDP2 over the GPUs that are here, a 0.6B-shaped model in bf16; ranks are processes as in a run.
One rank is compiled; several are compiled, then not. With `--each-pass` both again with weights put
together and gradients added up in every pass, as large models have it. With `--profile` where the
time of the last step goes lies beside the results, as ranks_profile_<way>_<rank>.txt; that step
takes 15 s then.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
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
NUM_LARGE = 4
WAYS: dict[str, dict[str, Any]] = {
    "compiled": {"compiles_layers": True},
    "eager": {},
}
EACH_PASS: dict[str, dict[str, Any]] = {
    f"{name}_each_pass": {**changes, "gathers_once": False} for name, changes in WAYS.items()
}
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Steps:
    """Steps of one trainer on one batch.

    Args:
        figures: Loss and gradient norm of each.
        seconds: The median of a step, the first two left out.
        each: Seconds of each step.
        peak_gib: The most that tensors took of the GPU of any rank.
        large: Seconds of each step on four times as many rows, where there were any.
        num_graphs: How many a rank has compiled.
    """

    figures: list[tuple[float, float]]
    seconds: float
    each: list[float]
    peak_gib: float
    large: list[float]
    num_graphs: int = 0

    @property
    def large_seconds(self) -> float:
        """The median of a large step, the first left out."""
        return statistics.median(self.large[1:])

    def norm_difference(self, other: "Steps", until: int | None = None) -> float:
        """The largest relative one between the gradient norms of the first steps."""
        pairs = zip(self.figures[:until], other.figures[:until], strict=True)
        return max(abs(a[1] - b[1]) / b[1] for a, b in pairs)

    def loss_difference(self, other: "Steps", until: int | None = None) -> float:
        """The largest one between the losses of the first steps."""
        pairs = zip(self.figures[:until], other.figures[:until], strict=True)
        return max(abs(a[0] - b[0]) for a, b in pairs)


class CountingRank(TorchTrainRank):
    """Tells how much was compiled."""

    async def num_graphs(self) -> int:
        """Graphs so far. Steps add none once their kinds of passes have all been seen."""
        from torch._dynamo.utils import counters  # the rank's own: this class was sent there

        return int(counters["stats"]["unique_graphs"])


class ProfiledRank(CountingRank):
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
        way = "compiled" if self._settings.compiles_layers else "eager"
        way += "_each_pass" if self._settings.gathers_once is False else ""
        name = f"ranks_profile_{way}_{self._rank.rank}.txt"
        (RESULTS / name).write_text("\n".join(tables))
        return share


def a_batch(num_groups: int = 8) -> TrainBatch:
    return batch_of(num_groups, 4, 512, 512, "0.6b")


async def steps(engine: TrainEngine, num_steps: int, num_large: int = 0) -> Steps:
    """Steps on the same rows, then some on four times as many."""
    await engine.prepare()
    batch, large = a_batch(), a_batch(32)
    figures, seconds = [], []
    async with my_turn("steps"):
        for number in range(num_steps + num_large):
            start = time.perf_counter()
            metrics = await engine.forward_backward(batch if number < num_steps else large, PPO)
            metrics |= await engine.optim_step()
            seconds.append(time.perf_counter() - start)
            figures.append((metrics["actor/final_loss"], metrics["actor/grad_norm"]))
    peak_gib = (await engine.health())["peak_gpu_memory_mb"] / 1024
    small, rest = seconds[:num_steps], seconds[num_steps:]
    return Steps(figures[:num_steps], statistics.median(small[2:]), small, peak_gib, rest)


def settings_of(**changes: Any) -> TorchEngineSettings:
    return TorchEngineSettings(
        model_folder("0.6b"),
        device="cuda",
        micro_batches=MicroBatchRule(max_tokens=8192),
        optimizer=OptimizerSettings(lr=1e-5),
        **changes,
    )


def placed() -> dict[str, Any]:
    """Where a process of one GPU goes."""
    environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return {"namespace": NAMESPACE, "num_gpus": 1, "env_vars": environment}


async def alone(num_steps: int, num_large: int = 0, **changes: Any) -> Steps:
    """The torch trainer on one GPU."""
    settings = settings_of(**changes)
    engine = actor.spawn(TorchTrainEngine, settings, None, name="alone", **placed())
    try:
        found = await steps(engine, num_steps, num_large)
        await engine.close()
        return found
    finally:
        actor.kill(engine)


async def in_ranks(
    kind: type,
    settings: TorchEngineSettings,
    num_ranks: int,
    num_steps: int,
    num_large: int = 0,
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
        group = RankGroup(ranks, settings)
        found = await steps(group, num_steps, num_large)
        if issubclass(kind, CountingRank):
            found = replace(found, num_graphs=await ranks[0].num_graphs())
        await group.close()
        return found
    finally:
        for rank in ranks:
            actor.kill(rank)


async def measure(
    num_ranks: int, ways: dict[str, dict[str, Any]], profiles: bool
) -> dict[str, object]:
    one = await alone(NUM_STEPS, NUM_LARGE, compiles_layers=True)
    result: dict[str, object] = {"num_ranks": num_ranks, "one_compiled": figures_of(one)}
    kind = ProfiledRank if profiles else CountingRank
    for name, changes in ways.items():
        found = await in_ranks(kind, settings_of(**changes), num_ranks, NUM_STEPS, NUM_LARGE)
        result[name] = {
            "speed_up": one.seconds / found.seconds,
            "speed_up_large": one.large_seconds / found.large_seconds,
            "max_norm_difference": found.norm_difference(one),
            "max_loss_difference": found.loss_difference(one),
            **figures_of(found),
        }
        print(name, result[name], flush=True)
    return result


def figures_of(found: Steps) -> dict[str, object]:
    return {
        "step_s": found.seconds,
        "large_step_s": found.large_seconds,
        "peak_gib": found.peak_gib,
        "num_graphs": found.num_graphs,
        "steps_s": found.each,
        "large_steps_s": found.large,
        "loss_and_norm": found.figures,
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
    parser.add_argument("--each-pass", action="store_true")
    args = parser.parse_args()
    ways = {**WAYS, **(EACH_PASS if args.each_pass else {})}
    num_ranks = min(2, torch.cuda.device_count())
    in_cluster("gpu_ranks", lambda: measure(num_ranks, ways, args.profile))
