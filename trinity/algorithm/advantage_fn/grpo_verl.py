"""GRPO's and RLOO's advantages in the trainer, from the rewards after a KL penalty."""

from collections.abc import Mapping

import torch
from torch import Tensor

from trinity.algorithm.advantage_fn.base import AdvantageFn, Metrics, tiled
from trinity.algorithm.advantage_fn.groups import Groups


def grpo_advantage(groups: Groups, epsilon: float) -> Tensor:
    """[B] ``(r - mean) / (std + epsilon)``; a group of one has mean 0 and std 1."""
    is_single_G = groups.size <= 1
    mean_G = torch.where(is_single_G, 0.0, groups.mean())
    std_G = torch.where(is_single_G, 1.0, groups.std())
    return (groups.reward - mean_G[groups.index]) / (std_G[groups.index] + epsilon)


class GRPOAdvantageFn(AdvantageFn):
    """``A = (r - mean) / (std + epsilon)``, with r the sum of the row's token rewards.

    A group of one has mean 0 and std 1.

    Args:
        epsilon: Added to the std.
    """

    def __init__(self, epsilon: float = 1e-6) -> None:
        self.epsilon = epsilon

    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Metrics]:
        groups = Groups.of(batch)
        advantages, returns = tiled(grpo_advantage(groups, self.epsilon), groups.mask)
        return advantages, returns, {}


class RLOOAdvantageFn(AdvantageFn):
    """``A = n / (n - 1) (r - mean)``: the reward above the mean of the others (arXiv:2402.14740).

    The advantage of a group of one is its reward.
    """

    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Metrics]:
        groups = Groups.of(batch)
        size_B = groups.size[groups.index]
        above_B = groups.reward - groups.mean()[groups.index]
        scaled_B = above_B * size_B / (size_B - 1).clamp(min=1)
        advantages, returns = tiled(torch.where(size_B > 1, scaled_B, groups.reward), groups.mask)
        return advantages, returns, {}
