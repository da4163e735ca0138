"""How close the torch trainer is to the card: whole steps, optimizer included.

    python -m benchmarks.gpu.train

Model FLOPs utilisation of a 1.5B-shaped model on packs of 8k tokens, tokens a second of a
0.6B-shaped one on 16k, what shared prefixes save, and the peak of memory beside the estimate of
`trinity explain`.
"""

import argparse
import asyncio
import gc
import statistics
import time
from functools import cache

import torch
from torch.nn.attention import current_flash_attention_impl

from benchmarks.gpu.common import (
    PEAK_FLOPS,
    config_of,
    model_folder,
    step_flops,
    used_bytes,
    write,
)
from trinity.common.config.memory import trainer_memory
from trinity.common.config.shape import find_shape
from trinity.common.experience import EID, Experience
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.settings import TorchEngineSettings
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective

PPO = Objective.from_names("ppo", {"clip_range": 0.2})


def batch_of(groups: int, samples: int, prompt: int, response: int, shape: str) -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    top = config_of(shape).vocab_size
    rows = []
    for task in range(groups):
        question = torch.randint(0, top, (prompt,), generator=generator)
        for run in range(samples):
            answer = torch.randint(0, top, (response,), generator=generator)
            rows.append(
                Experience(
                    eid=EID(batch=0, task=task, run=run),
                    tokens=torch.cat([question, answer]),
                    prompt_length=prompt,
                    logprobs=torch.full((response,), -12.0),
                    advantages=torch.randn(1, generator=generator).expand(response),
                    reward=0.0,
                )
            )
    return TrainBatch.from_experiences(rows)


async def measure(
    shape: str, batch: TrainBatch, max_tokens: int, steps: int = 8, **changes: object
) -> dict[str, float]:
    """Median seconds of a step, and the peak of memory: of tensors, and with the driver's."""
    settings = TorchEngineSettings(
        model_folder(shape),
        device="cuda",
        micro_batches=MicroBatchRule(max_tokens=max_tokens),
        optimizer=OptimizerSettings(lr=1e-6),
        **changes,  # type: ignore[arg-type]  # settings by name
    )
    engine = TorchTrainEngine(settings)
    started = time.perf_counter()
    await engine.prepare()
    loaded = time.perf_counter()
    seconds = []
    for step in range(steps + 3):
        if step == 3:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        await engine.forward_backward(batch, PPO)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        await engine.optim_step()
        torch.cuda.synchronize()
        end = time.perf_counter()
        if step == 0:
            first = end - start
        if step >= 3:
            seconds.append((end - start, middle - start))
    tensors, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    driver = used_bytes() - torch.cuda.memory_reserved() - bytes_of_others()
    await engine.close()
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return {
        "step_s": statistics.median(whole for whole, _ in seconds),
        "gradient_s": statistics.median(part for _, part in seconds),
        "first_step_s": first,
        "load_s": loaded - started,
        "peak_gib": (tensors + driver) / 2**30,
        "peak_of_tensors_gib": tensors / 2**30,
        "peak_reserved_gib": reserved / 2**30,
        "driver_gib": driver / 2**30,
    }


@cache
def bytes_of_others() -> int:
    """What is in use on the GPU before this program takes any: first called before that."""
    return used_bytes()


def lengths_of(batch: TrainBatch) -> list[int]:
    return [int(n) for n in batch.lengths.tolist()]


async def utilisation(compiles: bool, packs: int) -> dict[str, object]:
    batch = batch_of(8 * packs, 1, 128, 896, "1.5b")
    found = await measure("1.5b", batch, 8192, compiles_layers=compiles)
    flops = step_flops("1.5b", lengths_of(batch), batch.num_trained_tokens)
    return {
        **found,
        "packs_a_step": packs,
        "is_compiled": compiles,
        "tokens_per_second": sum(lengths_of(batch)) / found["step_s"],
        "mfu": flops / found["step_s"] / PEAK_FLOPS,
        "estimated_gib": estimated("1.5b", len(batch), 8192, compiles) / 2**30,
    }


async def small(compiles: bool) -> dict[str, object]:
    batch = batch_of(16, 1, 128, 896, "0.6b")
    found = await measure("0.6b", batch, 16384, compiles_layers=compiles)
    flops = step_flops("0.6b", lengths_of(batch), batch.num_trained_tokens)
    return {
        **found,
        "is_compiled": compiles,
        "tokens_per_second": sum(lengths_of(batch)) / found["step_s"],
        "mfu": flops / found["step_s"] / PEAK_FLOPS,
        "estimated_gib": estimated("0.6b", len(batch), 16384, compiles) / 2**30,
    }


async def shared(compiles: bool, max_tokens: int = 18432) -> dict[str, object]:
    """A pass holds 9 plain rows, or 2 whole groups with shared prompts."""
    batch = batch_of(8, 8, 1024, 1024, "1.5b")
    seconds = {}
    for shares in (False, True):
        found = await measure(
            "1.5b", batch, max_tokens, steps=4, shares_prefixes=shares, compiles_layers=compiles
        )
        seconds[shares] = found["step_s"]
    return {
        "is_compiled": compiles,
        "tokens_a_pass": max_tokens,
        "plain_s": seconds[False],
        "shared_s": seconds[True],
        "ratio": seconds[False] / seconds[True],
    }


def estimated(shape: str, rows: int, max_tokens: int, compiles: bool) -> float:
    """Bytes that `trinity explain` foresees for this trainer on one GPU, prompts not shared."""
    from trinity.common.config import Config, derive

    path = model_folder(shape)
    given = {
        "project": "benchmark",
        "name": "train",
        "mode": "train",
        "cluster": {"node_num": 1, "gpu_per_node": 1},
        "model": {"model_path": path, "max_model_len": 1024, "max_response_tokens": 896},
        "trainer": {
            "max_token_len_per_gpu": max_tokens,
            "use_torch_compile": compiles,
            "enable_shared_prefix": False,
        },
        "algorithm": {"algorithm_type": "grpo", "kl_loss_fn": "none"},
        "buffer": {"train_batch_size": rows, "batch_size": 1},
    }
    config = derive(Config.model_validate(given)).config
    shape_of = find_shape(path)
    assert shape_of is not None
    return float(sum(part.bytes for part in trainer_memory(config, shape_of, 1)))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["mfu", "small", "shared"], default=None)
    parser.add_argument("--eager", action="store_true", help="measure without torch.compile too")
    args = parser.parse_args()
    result: dict[str, object] = {"in_use_before_gib": bytes_of_others() / 2**30}
    kinds = [False, True] if args.eager else [True]
    for compiles in kinds:
        name = "compiled" if compiles else "eager"
        if args.only in (None, "mfu"):
            # first the long steps: what else the CPUs do at a start holds up short ones more
            result[f"1.5b_4x8k_{name}"] = await utilisation(compiles, 4)
            print(result, flush=True)
            result[f"1.5b_8k_{name}"] = await utilisation(compiles, 1)
            print(result, flush=True)
        if args.only in (None, "small"):
            result[f"0.6b_16k_{name}"] = await small(compiles)
            print(result, flush=True)
        if args.only in (None, "shared"):
            result[f"shared_prefix_{name}"] = await shared(compiles)
    result["flash_attention"] = current_flash_attention_impl() or "of PyTorch"
    write("gpu_train", result)


if __name__ == "__main__":
    asyncio.run(main())
