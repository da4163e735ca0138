"""Returns of token rewards: GAE, and REINFORCE with and without a baseline of its own.

Shape suffixes: B = rows, T = response tokens (padded).
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from trinity.algorithm.advantage_fn.base import AdvantageFn, Metrics
from trinity.algorithm.utils import masked_whiten


def gae(
    reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimate and return of every trained token.

    ``A_t = sum_k (gamma * lam)^k delta_{t+k}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``
    (arXiv:1506.02438, eq. 16). V after the last token is 0.

    Args:
        reward_BT: Reward per token. One on a masked token belongs to the trained token before it.
        value_BT: Critic output, in the unit of the reward.
        mask_BT: True on tokens the policy sampled; False on padding and tool output.
            Masked tokens are stepped over: time does not advance on them.
        gamma: Discount per token (not per turn), in [0, 1].
        lam: Bias-variance trade-off, in [0, 1]; 1 is the Monte Carlo return.

    Returns:
        Advantage and return, both [B, T], zero where masked, not normalised.
    """
    reward_BT = rewards_on_actions(reward_BT, mask_BT)
    advantages: list[Tensor] = []
    next_value_B = next_advantage_B = torch.zeros_like(value_BT[:, 0])
    for t in reversed(range(value_BT.shape[1])):
        is_on_B = mask_BT[:, t]
        delta_B = reward_BT[:, t] + gamma * next_value_B - value_BT[:, t]
        estimate_B = delta_B + gamma * lam * next_advantage_B
        next_value_B = torch.where(is_on_B, value_BT[:, t], next_value_B)
        next_advantage_B = torch.where(is_on_B, estimate_B, next_advantage_B)
        advantages.append(next_advantage_B)
    advantage_BT = torch.where(mask_BT, torch.stack(advantages[::-1], dim=1), 0.0)
    return advantage_BT, torch.where(mask_BT, advantage_BT + value_BT, 0.0)


def rewards_on_actions(reward_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Each reward moved to the last trained token at or before it, so that none is lost.

    One before the first trained token goes to that; a row without trained tokens keeps none.
    """
    place_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    last_BT = torch.where(mask_BT, place_T, -1).cummax(dim=1).values
    first_B1 = mask_BT.int().argmax(dim=1, keepdim=True)
    target_BT = torch.where(last_BT < 0, first_B1, last_BT)
    moved_BT = torch.zeros_like(reward_BT).scatter_add(1, target_BT, reward_BT)
    return torch.where(mask_BT, moved_BT, 0.0)


def reward_to_go(reward_BT: Tensor, gamma: float) -> Tensor:
    """``R_t = r_t + gamma R_{t+1}`` over the full width, masked tokens included."""
    if gamma == 1.0:
        return reward_BT.flip(1).cumsum(1).flip(1)
    returns: list[Tensor] = [torch.zeros_like(reward_BT[:, 0])]
    for t in reversed(range(reward_BT.shape[1])):
        returns.append(reward_BT[:, t] + gamma * returns[-1])
    return torch.stack(returns[:0:-1], dim=1)


def finite_rewards(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Token rewards (0 in rows without a trained token) and mask of a batch.

    Raises:
        ValueError: The reward of a live row is NaN or infinite.
    """
    mask_BT = batch["action_mask"].bool()
    is_live_B1 = mask_BT.any(dim=1, keepdim=True)
    reward_BT = torch.where(is_live_B1, batch["token_level_rewards"].float(), 0.0)
    is_bad_B = ~reward_BT.isfinite().all(dim=1)
    if bool(is_bad_B.any()):
        raise ValueError(
            f"Rows {is_bad_B.nonzero()[:, 0].tolist()} of the batch have rewards that are NaN or "
            "infinite: fix the reward function, or drop them (operator invalid_reward_filter)."
        )
    return reward_BT, mask_BT


class PPOAdvantageFn(AdvantageFn):
    """GAE (arXiv:1506.02438), whitened over the trained tokens of the batch; returns are not.

    Time advances on trained tokens only.

    Args:
        gamma: Discount per token.
        lam: Bias-variance trade-off.
    """

    requires: ClassVar[tuple[str, ...]] = ("values",)

    def __init__(self, gamma: float = 1.0, lam: float = 1.0) -> None:
        self.gamma, self.lam = gamma, lam

    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Metrics]:
        reward_BT, mask_BT = finite_rewards(batch)
        value_BT = batch["values"].float()
        advantage_BT, return_BT = gae(reward_BT, value_BT, mask_BT, gamma=self.gamma, lam=self.lam)
        return masked_whiten(advantage_BT, mask_BT), return_BT, {}


class ReinforcePlusPlusAdvantageFn(AdvantageFn):
    """Discounted reward-to-go, whitened over the trained tokens of the batch (arXiv:2501.03262).

    Time advances on masked tokens too. Returns are not whitened.

    Args:
        gamma: Discount per token.
    """

    def __init__(self, gamma: float = 1.0) -> None:
        self.gamma = gamma

    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Metrics]:
        reward_BT, mask_BT = finite_rewards(batch)
        return_BT = reward_to_go(reward_BT, self.gamma)
        return masked_whiten(return_BT, mask_BT), return_BT.masked_fill(~mask_BT, 0.0), {}


class RemaxAdvantageFn(AdvantageFn):
    """Reward-to-go less the reward of the greedy answer (ReMax, arXiv:2310.10505).

    ``reward_baselines`` [B] is the reward of the greedy answer to the row's prompt; a workflow
    puts it into ``info`` and gives it to the trainer as a custom field.
    """

    requires: ClassVar[tuple[str, ...]] = ("reward_baselines",)

    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Metrics]:
        reward_BT, mask_BT = finite_rewards(batch)
        return_BT = reward_to_go(rewards_on_actions(reward_BT, mask_BT), gamma=1.0)
        advantage_BT = return_BT - batch["reward_baselines"].float()[:, None]
        hidden_BT = ~mask_BT
        return advantage_BT.masked_fill(hidden_BT, 0.0), return_BT.masked_fill(hidden_BT, 0.0), {}
