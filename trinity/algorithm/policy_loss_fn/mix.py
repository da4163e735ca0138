"""MIX: PPO on rollouts and SFT on expert data in one loss (arXiv:2505.17826).

CHORD (arXiv:2508.11408) fades the expert part out by a schedule and weights its tokens.
"""

import inspect
import math
import warnings
from collections.abc import Callable
from functools import wraps
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from trinity.algorithm.aggregate import as_metric
from trinity.algorithm.policy_loss_fn.base import Metrics, PolicyLossFn
from trinity.algorithm.policy_loss_fn.ppo import PPOPolicyLossFn
from trinity.algorithm.policy_loss_fn.sft import PhiSFTPolicyLossFn, SFTPolicyLossFn
from trinity.algorithm.utils import prefix_metrics

_NOT_NEEDED = (
    "use_dynamic_bsz",
    "ppo_mini_batch_size",
    "ppo_micro_batch_size_per_gpu",
    "ngpus_trainer",
    "train_batch_size_usual",
    "train_batch_size_expert",
)


def _takes_batch_sizes(init: Callable[..., None]) -> Callable[..., None]:
    """``init``, which then accepts the batch sizes of older configurations, with a warning."""

    @wraps(init)
    def taking(self: object, *args: Any, **given: Any) -> None:
        named = [name for name in _NOT_NEEDED if given.pop(name, None) is not None]
        if named:
            warnings.warn(
                f"{', '.join(named)} in policy_loss_fn_args: not needed, and not used. Both parts "
                "of the loss are averaged over the rows that the batch really has.",
                stacklevel=2,
            )
        init(self, *args, **given)

    own = inspect.signature(init)
    more = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in _NOT_NEEDED]
    signature = own.replace(parameters=[*own.parameters.values(), *more])
    taking.__signature__ = signature  # type: ignore[attr-defined]  # `default_args` reads it
    return taking


class MixPolicyLossFn(PolicyLossFn):
    """``(1 - mu) PPO(usual rows) + mu SFT(expert rows)``, each a mean over its own part.

    The means are over the whole optimizer step, so the batch sizes that older configurations
    repeat here are not needed: they are accepted with a warning.

    Args:
        mu: Weight of the expert part, in [0, 1].
        clip_range: As in `ppo`; so are the next two.
        clip_range_low: How far below 1 the ratio counts.
        clip_range_high: How far above 1 the ratio counts.
        loss_agg_mode: Of both parts, unless one of the next two is given.
        sft_loss_agg_mode: Of the expert part.
        grpo_loss_agg_mode: Of the usual part.
        use_dynamic_bsz, ppo_mini_batch_size, ppo_micro_batch_size_per_gpu, ngpus_trainer,
            train_batch_size_usual, train_batch_size_expert: Not needed; counted from the batch.
    """

    @_takes_batch_sizes
    def __init__(
        self,
        mu: float = 0.1,
        clip_range: float = 0.2,
        clip_range_low: float | None = None,
        clip_range_high: float | None = None,
        loss_agg_mode: str = "token-mean",
        sft_loss_agg_mode: str | None = None,
        grpo_loss_agg_mode: str | None = None,
    ) -> None:
        self.mu = _share("mu", mu)
        self.usual_loss = PPOPolicyLossFn(
            clip_range=clip_range,
            clip_range_low=clip_range_low,
            clip_range_high=clip_range_high,
            loss_agg_mode=grpo_loss_agg_mode or loss_agg_mode,
        )
        self.expert_loss = SFTPolicyLossFn(sft_loss_agg_mode or loss_agg_mode)

    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        expert_mask: Tensor,
    ) -> tuple[Tensor, Metrics]:
        parts = (self.usual_loss, self.expert_loss)
        return mixed(self.mu, *parts, logprob, old_logprob, action_mask, advantages, expert_mask)


class MixCHORDPolicyLossFn(PolicyLossFn):
    """As `mix`, with ``mu`` by a schedule and expert tokens weighted by ``phi = p (1 - p)``.

    ``mu`` rises linearly from 0 to its peak, falls along a cosine to its valley, and stays there.

    Args:
        mu_warmup_steps: Trainer steps of the rise.
        mu_decay_steps: Trainer steps of the fall.
        mu_peak: ``mu`` after the rise.
        mu_valley: ``mu`` after the fall.
        enable_phi_function: Weight expert tokens by phi; False is plain SFT.
        clip_range: As in `ppo`; so are the next two.
        clip_range_low: How far below 1 the ratio counts.
        clip_range_high: How far above 1 the ratio counts.
        loss_agg_mode: Of both parts, unless one of the next two is given.
        sft_loss_agg_mode: Of the expert part.
        grpo_loss_agg_mode: Of the usual part.
        use_dynamic_bsz, ppo_mini_batch_size, ppo_micro_batch_size_per_gpu, ngpus_trainer,
            train_batch_size_usual, train_batch_size_expert: Not needed; counted from the batch.
    """

    @_takes_batch_sizes
    def __init__(
        self,
        mu_warmup_steps: int = 0,
        mu_decay_steps: int = 0,
        mu_peak: float = 0.1,
        mu_valley: float = 0.1,
        enable_phi_function: bool = True,
        clip_range: float = 0.2,
        clip_range_low: float | None = None,
        clip_range_high: float | None = None,
        loss_agg_mode: str = "token-mean",
        sft_loss_agg_mode: str | None = None,
        grpo_loss_agg_mode: str | None = None,
    ) -> None:
        self.warmup, self.decay = mu_warmup_steps, mu_decay_steps
        self.peak, self.valley = _share("mu_peak", mu_peak), _share("mu_valley", mu_valley)
        self.usual_loss = PPOPolicyLossFn(
            clip_range=clip_range,
            clip_range_low=clip_range_low,
            clip_range_high=clip_range_high,
            loss_agg_mode=grpo_loss_agg_mode or loss_agg_mode,
        )
        mode = sft_loss_agg_mode or loss_agg_mode
        weighted = PhiSFTPolicyLossFn(loss_agg_mode=mode)
        self.expert_loss = weighted if enable_phi_function else SFTPolicyLossFn(mode)

    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        expert_mask: Tensor,
        step: Tensor,
    ) -> tuple[Tensor, Metrics]:
        if bool((step != step[0]).any()):
            raise ValueError(f"Rows of one batch have different steps: {step.unique().tolist()}.")
        mu = chord_mu(
            int(step[0]), warmup=self.warmup, decay=self.decay, peak=self.peak, valley=self.valley
        )
        parts = (self.usual_loss, self.expert_loss)
        loss, metrics = mixed(
            mu, *parts, logprob, old_logprob, action_mask, advantages, expert_mask
        )
        return loss, {**metrics, "mu": torch.tensor(mu, device=loss.device)}


def chord_mu(step: int, *, warmup: int, decay: int, peak: float, valley: float) -> float:
    """Weight of the expert part at trainer step ``step``."""
    if step < warmup:
        return peak * step / warmup
    if step >= warmup + decay:
        return valley
    return valley + (peak - valley) * (1 + math.cos(math.pi * (step - warmup) / decay)) / 2


def mixed(
    mu: float,
    usual_loss: PPOPolicyLossFn,
    expert_loss: SFTPolicyLossFn,
    logprob: Tensor,
    old_logprob: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    expert_mask: Tensor,
) -> tuple[Tensor, Metrics]:
    """``(1 - mu) usual + mu expert``; a part without rows in the whole step adds nothing."""
    is_expert_B = expert_mask.bool()
    usual, usual_metrics = usual_loss.share(
        logprob, old_logprob, action_mask, advantages, rows=~is_expert_B, part="usual"
    )
    expert, expert_metrics = expert_loss.share(
        logprob, action_mask, rows=is_expert_B, part="expert"
    )
    loss = (1 - mu) * usual + mu * expert
    return loss, {
        **prefix_metrics(usual_metrics, "usual"),
        **prefix_metrics(expert_metrics, "expert"),
        "loss": as_metric(loss, action_mask),
    }


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; it must be in [0, 1].")
    return value
