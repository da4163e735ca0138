"""How long new weights take from one GPU to another: last optimizer kernel to first new token.

    python -m benchmarks.gpu.sync

Two GPUs of one host, a 1.5B-shaped bf16 model: the trainer in one process, vLLM in another, as in
a run with `sync_method: nccl`. Every call goes through Ray, as there. With a trainer that waits
meanwhile, and with one that has begun its next step ("training").
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from typing import Any

import torch

from benchmarks.gpu.common import model_folder, write
from benchmarks.gpu.train import batch_of
from benchmarks.gpu.turns import my_turn
from trinity.common.experience import EID, Experience
from trinity.common.models.protocol import SamplingParams, WeightTicket
from trinity.synchronizer.nccl import NCCLChannel
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.settings import TorchEngineSettings
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective
from trinity.utils import actor

PPO = Objective.from_names("ppo", {"clip_range": 0.2})
NAMESPACE = "benchmark"
_WARM = 3  # rounds


class TimedTrainer(TorchTrainEngine):
    """Tells when the last kernel of an optimizer step had ended."""

    async def step_and_send(self, version: int) -> tuple[float, WeightTicket]:
        def work() -> tuple[float, WeightTicket]:
            self._step("actor")
            torch.cuda.synchronize()
            ended = time.time()
            assert self._channel is not None
            weights = self._trained("actor").optimizer.weights
            return ended, self._channel.send(version, weights.export())

        return await self._run(work)

    async def peak_gib(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**30


def a_batch() -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 100_000, (256,), generator=generator)
    row = Experience(
        eid=EID(batch=0, task=0, run=0),
        tokens=tokens,
        prompt_length=128,
        logprobs=torch.full((128,), -12.0),
        advantages=torch.ones(128),
        reward=1.0,
    )
    return TrainBatch.from_experiences([row])


def figures(rounds: list[tuple[float, float]]) -> dict[str, float]:
    """In ms, of what each round took until weights were in place and until the first token."""
    totals = [total for _, total in rounds]
    return {
        "p50_ms": 1000 * statistics.median(totals),
        "p90_ms": 1000 * statistics.quantiles(totals, n=10)[-1],
        "max_ms": 1000 * max(totals),
        "p50_load_ms": 1000 * statistics.median(load for load, _ in rounds),
        "p50_first_token_ms": 1000 * statistics.median(total - load for load, total in rounds),
    }


async def measure(args: argparse.Namespace) -> dict[str, object]:
    from trinity.engine.vllm.engine import VLLMEngine
    from trinity.engine.vllm.settings import VLLMEngineSettings

    model = model_folder("1.5b", args.tokenizer)
    environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    where: dict[str, Any] = {"namespace": NAMESPACE, "num_gpus": 1, "env_vars": environment}
    engine = actor.spawn(
        VLLMEngine,
        VLLMEngineSettings(
            model,
            max_model_len=2048,
            gpu_memory_utilization=0.3,
            kv_cache_bytes=4 * 2**30,
            keeps_seeds=False,
        ),
        name="engine",
        **where,
    )
    trainer = actor.spawn(
        TimedTrainer,
        TorchEngineSettings(
            model,
            device="cuda",
            micro_batches=MicroBatchRule(max_tokens=8192),
            optimizer=OptimizerSettings(lr=1e-4),
        ),
        NCCLChannel(1, is_live=True),
        name="trainer",
        **where,
    )
    await asyncio.gather(engine.prepare(), trainer.prepare())
    prompt = a_batch().row_tokens()[0].tolist()
    first = SamplingParams(max_tokens=1, ignore_eos=True)
    versions = iter(range(1, 2 * (args.rounds + _WARM) + 1))

    async def one(batch: TrainBatch | None) -> tuple[float, float]:
        """Seconds until weights are in place, and until the first token."""
        await trainer.forward_backward(a_batch(), PPO)
        await engine.sample(prompt, first)
        ended, ticket = await trainer.step_and_send(next(versions))
        next_step = [] if batch is None else [trainer.forward_backward(batch, PPO)]
        under_way = asyncio.gather(*next_step)
        await engine.load_weights(ticket)
        loaded = time.time()
        await engine.sample(prompt, first)
        done = time.time()
        await under_way
        return loaded - ended, done - ended

    async with my_turn("sync"):
        waiting = [await one(None) for _ in range(args.rounds + _WARM)]
        next_batch = batch_of(32, 1, 128, 896, "1.5b")
        training = [await one(next_batch) for _ in range(args.rounds + _WARM)]
    scored = await engine.logprobs(prompt)
    batch = a_batch()
    own = (await trainer.forward(batch))["logprob"][0]
    gap = (torch.tensor(scored[127:]) - own).abs()
    result: dict[str, object] = {
        "rounds": args.rounds,
        **figures(waiting[_WARM:]),
        "training": figures(training[_WARM:]),
        "logprob_gap_mean": float(gap.mean()),
        "logprob_gap_max": float(gap.max()),
        "trainer_peak_gib": await trainer.peak_gib(),
    }
    await asyncio.gather(engine.close(), trainer.close())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", default=None)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    from trinity.launcher.cluster import ray_cluster

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRINITY_LOG_DIR"] = folder
        with ray_cluster("local", NAMESPACE, {"TRINITY_LOG_DIR": folder}):
            write("gpu_sync", asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
