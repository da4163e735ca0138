"""Statistics of groups of rows in the trainer's batch, found by ``group_id``.

Shape suffixes: B = rows, T = response tokens, G = groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Rewards of rows, and which group each row is in. Rows without a trained token are in none.

    All sums are float64 and taken from the group's smallest reward, so that equal rewards have a
    deviation of exactly 0 whatever their size.
    """

    reward: Tensor
    """[B] float64 sum of the row's ``token_level_rewards``; 0 for a masked row."""

    index: Tensor
    """[B] number of the row's group in 0 .. G-1."""

    size: Tensor
    """[G] live rows."""

    is_live: Tensor
    """[B] whether the row has a trained token."""

    mask: Tensor
    """[B, T] trained tokens."""

    @classmethod
    def of(cls, batch: Mapping[str, Tensor]) -> "Groups":
        """The groups of a batch with ``token_level_rewards``, ``action_mask`` and ``group_id``.

        Raises:
            ValueError: A live row's reward is NaN or infinite.
        """
        mask_BT = batch["action_mask"].bool()
        is_live_B = mask_BT.any(dim=1)
        reward_B = batch["token_level_rewards"].double().sum(dim=1)
        reward_B = torch.where(is_live_B, reward_B, torch.zeros_like(reward_B))
        if not bool(reward_B.isfinite().all()):
            rows = (~reward_B.isfinite()).nonzero()[:, 0].tolist()
            raise ValueError(
                f"Rows {rows} of the batch have rewards that are NaN or infinite: fix the reward "
                "function, or drop them (operator invalid_reward_filter)."
            )
        _, index_B = torch.unique(batch["group_id"], return_inverse=True)
        size_G = torch.bincount(index_B, weights=is_live_B.double())
        return cls(reward_B, index_B, size_G, is_live_B, mask_BT)

    def sum(self, value_B: Tensor) -> Tensor:
        """[G] sum of a float64 number per live row."""
        zeros = torch.zeros_like(self.size)
        return zeros.index_add(0, self.index, torch.where(self.is_live, value_B, 0.0))

    def extreme(self, how: str) -> Tensor:
        """[G] smallest (``amin``) or largest (``amax``) reward; 0 for a group without live rows."""
        neutral = float("inf") if how == "amin" else float("-inf")
        value_B = torch.where(self.is_live, self.reward, neutral)
        start_G = torch.full_like(self.size, neutral)
        extreme_G = start_G.scatter_reduce(0, self.index, value_B, how)
        return torch.where(self.size > 0, extreme_G, 0.0)

    def mean(self) -> Tensor:
        """[G] mean reward."""
        base_G = self.extreme("amin")
        above_G = self.sum(self.reward - base_G[self.index])
        return base_G + above_G / self.size.clamp(min=1)

    def std(self) -> Tensor:
        """[G] unbiased deviation of the rewards; 0 for a group of one."""
        square_G = self.sum((self.reward - self.mean()[self.index]).square())
        return (square_G / (self.size - 1).clamp(min=1)).sqrt()

    def log_mean_exp(self, tau: float) -> Tensor:
        """[G] ``tau log mean exp(r / tau)``."""
        top_G = self.extreme("amax")
        share_G = self.sum(((self.reward - top_G[self.index]) / tau).exp())
        mean_G = torch.where(self.size > 0, share_G / self.size, 1.0)
        return top_G + tau * mean_G.log()
