"""veRL's engines beside the torch trainer: the same steps of GRPO on one and two GPUs.

    python -m benchmarks.gpu.verl

A 0.6B-shaped model in bf16, 32 rows of 1,024 tokens a step: ten steps of `fsdp2` on one and on two
GPUs, three of `fsdp` (`--strategies`), ten of `megatron` on one GPU if it is asked for: it needs
the packages of requirements/megatron-gpu.txt. Without flash-attn veRL pads its rows, and takes
log-probabilities token by token in a Python loop unless its fused kernels are on (`--fused ""` for
that).
"""

import argparse

import torch

from benchmarks.gpu.ranks import Steps, a_batch, alone, in_cluster, in_ranks, settings_of
from trinity.common.config import Config, derive
from trinity.common.config.memory import trainer_memory
from trinity.common.config.memory_parts import Part
from trinity.common.config.shape import find_shape
from trinity.trainer.backends.verl.megatron_rank import MegatronTrainRank
from trinity.trainer.backends.verl.rank import VerlTrainRank
from trinity.trainer.backends.verl.settings import Strategy, VerlEngineSettings

_MODEL = "actor_rollout_ref.model"
_NUM_STEPS = 10


def figures(found: Steps, wanted: Steps) -> dict[str, object]:
    num_steps = len(found.figures)
    return {
        "loss_and_norm": found.figures,
        "first_norm_difference": found.norm_difference(wanted, 1),
        "max_norm_difference": found.norm_difference(wanted, num_steps),
        "max_loss_difference": found.loss_difference(wanted, num_steps),
        "step_s": found.seconds,
        "samples_per_second": len(a_batch()) / found.seconds,
        "peak_of_tensors_gib": found.peak_gib,
        "speed_beside_torch_on_one_gpu": wanted.seconds / found.seconds,
    }


def foreseen() -> dict[str, float]:
    """GiB that `trinity explain` tells for Megatron on one GPU."""
    own, rows = settings_of(), len(a_batch())
    given = {
        "project": "benchmark",
        "name": "megatron",
        "mode": "train",
        "cluster": {"node_num": 1, "gpu_per_node": 1},
        "model": {"model_path": own.model_path, "max_model_len": 1024, "max_response_tokens": 512},
        "trainer": {
            "trainer_type": "verl",
            "trainer_strategy": "megatron",
            "max_token_len_per_gpu": own.micro_batches.max_tokens,
        },
        "algorithm": {"algorithm_type": "grpo", "kl_loss_fn": "none", "entropy_loss_fn": "none"},
        "buffer": {"train_batch_size": rows, "batch_size": 1},
    }
    shape = find_shape(own.model_path)
    assert shape is not None
    parts: list[Part] = trainer_memory(derive(Config.model_validate(given)).config, shape, 1)
    return {part.name: part.bytes / 2**30 for part in parts}


async def measure(fused: str, strategies: list[Strategy]) -> dict[str, object]:
    wanted = await alone(_NUM_STEPS)
    result: dict[str, object] = {
        "fused_kernels": fused or None,
        "torch_1_gpu": figures(wanted, wanted),
    }
    verl: dict[str, object] = {}
    if fused:
        verl[f"{_MODEL}.use_fused_kernels"] = True
        verl[f"{_MODEL}.fused_kernel_options.impl_backend"] = fused
    wishes: list[tuple[Strategy, int, int]] = [("fsdp2", 1, _NUM_STEPS), ("fsdp", 1, 3)]
    wishes += [("fsdp2", 2, _NUM_STEPS), ("fsdp", 2, 3), ("megatron", 1, _NUM_STEPS)]
    for strategy, num_ranks, num_steps in wishes:
        if num_ranks > torch.cuda.device_count() or strategy not in strategies:
            continue
        is_megatron = strategy == "megatron"
        keys = {} if is_megatron else verl
        settings = VerlEngineSettings.of(settings_of(), strategy=strategy, verl=keys)
        kind = MegatronTrainRank if is_megatron else VerlTrainRank
        found = await in_ranks(kind, settings, num_ranks, num_steps)
        result[f"{strategy}_{num_ranks}_gpu"] = figures(found, wanted)
        if is_megatron:
            result["megatron_foreseen_gib"] = foreseen()
        print(result, flush=True)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fused", choices=["torch", "triton", ""], default="torch")
    both = ["fsdp2", "fsdp"]
    parser.add_argument("--strategies", nargs="+", choices=[*both, "megatron"], default=both)
    args = parser.parse_args()
    name = "gpu_verl_megatron" if args.strategies == ["megatron"] else "gpu_verl"
    in_cluster(name, lambda: measure(args.fused, args.strategies))
