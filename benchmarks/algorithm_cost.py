"""Advantages and losses of 4,096 responses of 1,024 tokens, against one forward pass of 0.5B.

The forward pass is counted, not run: 2 FLOPs a parameter and token, at the rate at which this
machine multiplies matrices in this very process. The last line is the result as JSON.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from trinity.algorithm import ADVANTAGE_FN, POLICY_LOSS_FN
from trinity.algorithm.aggregate import LossScope, loss_scope
from trinity.common.experience import EID, Experience

PARAMETERS = 0.5e9
GROUP = 8


def seconds(run: Callable[[], object]) -> float:
    """Time of one run, after one to warm up."""
    run()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def matmul_flops_per_second() -> float:
    size, repeats = 1024, 8
    a, b = torch.randn(size, size), torch.randn(size, size)
    return repeats * 2 * size**3 / seconds(lambda: [a @ b for _ in range(repeats)])


def make_batch(rows: int, width: int) -> dict[str, Tensor]:
    logprob = -torch.rand(rows, width)
    rewards = torch.zeros(rows, width)
    rewards[:, -1] = torch.rand(rows)
    return {
        "logprob": logprob,
        "old_logprob": logprob + 0.1 * torch.randn(rows, width),
        "action_mask": torch.ones(rows, width, dtype=torch.bool),
        "advantages": torch.randn(rows, 1).expand(rows, width).contiguous(),
        "token_level_rewards": rewards,
        "values": torch.rand(rows, width),
        "group_id": torch.arange(rows) // GROUP,
    }


def loss_and_gradient(name: str, batch: dict[str, Tensor], scope: LossScope) -> None:
    loss_fn = POLICY_LOSS_FN.get(name)()
    logprob = batch["logprob"].clone().requires_grad_()
    tensors = {**batch, "logprob": logprob}
    with loss_scope(scope):
        loss, _ = loss_fn(**{n: tensors[n] for n in loss_fn.inputs()})
    loss.backward()


def make_experiences(rows: int, width: int) -> list[Experience]:
    tokens = torch.zeros(width + 1, dtype=torch.int32)
    return [
        Experience(eid=EID(0, i // GROUP, i % GROUP), tokens=tokens, reward=float(i % 3))
        for i in range(rows)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024)
    size = parser.parse_args()
    batch = make_batch(size.rows, size.tokens)
    scope = LossScope.of(batch["action_mask"])
    experiences = make_experiences(size.rows, size.tokens)
    forward = 2 * PARAMETERS * size.rows * size.tokens / matmul_flops_per_second()
    found = {
        "grpo operator": seconds(lambda: ADVANTAGE_FN.get("grpo")().process(experiences)),
        "grpo in the trainer": seconds(lambda: ADVANTAGE_FN.get("grpo_verl")()(batch)),
        "gae": seconds(lambda: ADVANTAGE_FN.get("ppo")(gamma=0.99, lam=0.95)(batch)),
    } | {
        f"{name} loss and gradient": seconds(
            lambda name=name: loss_and_gradient(name, batch, scope)
        )  # type: ignore[misc]
        for name in ("ppo", "gspo", "cispo")
    }
    for name, taken in found.items():
        print(f"{name:28s} {taken:8.3f} s  {taken / forward:.2e} of a forward pass")
    worst = found["gae"] + max(v for n, v in found.items() if n.endswith("gradient"))
    result = {
        "seconds": {n: round(v, 4) for n, v in found.items()},
        "forward_s": round(forward, 1),
        "share": worst / forward,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
