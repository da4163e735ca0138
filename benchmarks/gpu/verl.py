"""veRL's FSDP2 engine beside the torch trainer: the same ten steps of GRPO on one and two GPUs.

    python -m benchmarks.gpu.verl

A 0.6B-shaped model in bf16, 32 rows of 1,024 tokens a step. Without flash-attn veRL pads its rows.
"""

import torch

from benchmarks.gpu.ranks import Steps, a_batch, alone, in_cluster, in_ranks, settings_of
from trinity.trainer.backends.verl.rank import VerlTrainRank
from trinity.trainer.backends.verl.settings import VerlEngineSettings

NUM_STEPS = 10


def figures(found: Steps, wanted: Steps) -> dict[str, object]:
    return {
        "loss_and_norm": found.figures,
        "first_norm_difference": found.norm_difference(wanted, 1),
        "max_norm_difference": found.norm_difference(wanted),
        "max_loss_difference": found.loss_difference(wanted),
        "step_s": found.seconds,
        "samples_per_second": len(a_batch()) / found.seconds,
        "speed_beside_torch_on_one_gpu": wanted.seconds / found.seconds,
    }


async def measure() -> dict[str, object]:
    wanted = await alone(NUM_STEPS)
    result: dict[str, object] = {"torch_1_gpu": figures(wanted, wanted)}
    settings = VerlEngineSettings.of(settings_of(), strategy="fsdp2")
    for num_ranks in (1, 2)[: torch.cuda.device_count()]:
        found = await in_ranks(VerlTrainRank, settings, num_ranks, NUM_STEPS)
        result[f"verl_{num_ranks}_gpu"] = figures(found, wanted)
        print(result, flush=True)
    return result


if __name__ == "__main__":
    in_cluster("gpu_verl", measure)
