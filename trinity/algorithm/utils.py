"""Masked statistics that the formulas share. Sums that depend on the batch are in `aggregate`.

Masked entries are never read: NaN or infinity under the mask changes neither value nor gradient.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from trinity.utils.metrics import prefix_metrics

__all__ = [
    "MAX_LOG_RATIO",
    "log_ratio",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "prefix_metrics",
    "sampled",
    "visible",
]

#: Above this a log ratio is cut: ``exp(20)`` is 5e8, far beyond any clip range, and finite.
MAX_LOG_RATIO = 20.0


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Sum of the entries where ``mask`` holds, over ``axis`` or over all."""
    kept = torch.where(mask.bool(), values, torch.zeros_like(values))
    return kept.sum() if axis is None else kept.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean of the entries where ``mask`` holds; 0 if there are none."""
    count = mask.bool().sum() if axis is None else mask.bool().sum(dim=axis)
    return masked_sum(values, mask, axis) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the entries where ``mask`` holds; 0 for fewer than two of them."""
    count = mask.bool().sum()
    deviation = masked_sum((values - masked_mean(values, mask)).square(), mask)
    return deviation / (count - int(unbiased)).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Entries brought to variance 1, and to mean 0 unless ``shift_mean`` is False; 0 where masked.

    The statistics are taken in float64: the rounding of a mean of 1e6 must not be blown up to 1.
    """
    exact = values.double()
    mean = masked_mean(exact, mask)
    white = (exact - mean) * torch.rsqrt(masked_var(exact, mask) + 1e-8)
    if not shift_mean:
        white = white + mean
    return torch.where(mask.bool(), white, torch.zeros_like(white)).to(values.dtype)


def visible(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with 0 where ``mask`` is False, so that nothing under it reaches a gradient."""
    hidden = ~mask.bool()
    return tuple(tensor.masked_fill(hidden, 0.0) for tensor in tensors)


def log_ratio(logprob: Tensor, old_logprob: Tensor) -> Tensor:
    """``log(new / old)`` of every token, cut to +-20; its gradient is 0 beyond."""
    return (logprob - old_logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sampled(batch: Mapping[str, Tensor]) -> Tensor:
    """[B, T] trained tokens that an engine sampled: not those of rows of expert data."""
    mask = batch["action_mask"].bool()
    return mask & ~batch["expert_mask"].bool()[:, None] if "expert_mask" in batch else mask
