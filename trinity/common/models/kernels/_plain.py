"""The kernels of this package by PyTorch's operations: so many rows at a time as the cache holds.

What each computes says `trinity.common.models.kernels`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu

_CACHE_ELEMENTS = 1 << 17  # float32 values of one operand that are worked on at a time
_LOGIT_ELEMENTS = 1 << 19


def rms_norm(rows_MD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out_MD = torch.empty_like(rows_MD)
    scale_M = rows_MD.new_empty(len(rows_MD), dtype=torch.float32)
    for now in parts(rows_MD, _CACHE_ELEMENTS):
        wide = rows_MD[now].to(torch.float32, copy=True)
        scale_M[now] = torch.rsqrt(wide.pow(2).mean(-1) + eps)
        torch.mul(weight_D, wide.mul_(scale_M[now, None]).to(rows_MD.dtype), out=out_MD[now])
    return out_MD, scale_M


def rms_norm_backward(
    grad_MD: Tensor, rows_MD: Tensor, weight_D: Tensor, scale_M: Tensor
) -> tuple[Tensor, Tensor]:
    found_MD = torch.empty_like(rows_MD)
    wide_D = weight_D.float()
    grad_D = torch.zeros_like(wide_D)
    for now in parts(rows_MD, _CACHE_ELEMENTS):
        unit = rows_MD[now].to(torch.float32, copy=True).mul_(scale_M[now, None])
        own = grad_MD[now].to(torch.float32, copy=True)
        product = own * unit
        grad_D += product.sum(dim=0)
        along = torch.mv(product, wide_D).div_(len(wide_D))
        own.mul_(wide_D).addcmul_(unit, along[:, None], value=-1).mul_(scale_M[now, None])
        found_MD[now] = own
    return found_MD, grad_D


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate).mul_(up)


def silu_mul_backward_inplace(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    active = silu(gate)
    out = active * up
    gate_grad = torch.ops.aten.silu_backward(grad * up, gate)
    grad.mul_(active)
    return out, gate_grad


def rotate_inplace(
    rows_MHD: Tensor, cosine_MD: Tensor, sine_MD: Tensor, is_gradient: bool
) -> Tensor:
    first, second = rows_MHD.chunk(2, dim=-1)
    cos1, cos2 = cosine_MD[:, None].chunk(2, dim=-1)
    sin1, sin2 = sine_MD[:, None].chunk(2, dim=-1)
    if is_gradient:
        sin1, sin2 = -sin2, -sin1
    rotated = torch.cat([first * cos1 - second * sin1, second * cos2 + first * sin2], dim=-1)
    return rows_MHD.copy_(rotated)


def token_statistics(
    logits_MV: Tensor, divisor_M: Tensor, target_M: Tensor, wants_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    logprob = torch.empty_like(divisor_M)
    log_norm, entropy = torch.empty_like(divisor_M), torch.zeros_like(divisor_M)
    for now in parts(logits_MV, _LOGIT_ELEMENTS):
        logits = _divided(logits_MV[now], divisor_M[now])
        picked = logits.gather(1, target_M[now, None]).squeeze(1)
        peak = logits.amax(dim=1)
        shifted = logits.sub_(peak[:, None])
        probs = shifted.exp()
        total = probs.sum(dim=1)
        log_norm[now] = total.log() + peak
        logprob[now] = picked - log_norm[now]
        if wants_entropy:
            mean = torch.bmm(probs[:, None], shifted[:, :, None]).flatten() / total
            entropy[now] = total.log() - mean
    return logprob, log_norm, entropy


def logit_gradient_inplace(
    logits_MV: Tensor,
    divisor_M: Tensor,
    target_M: Tensor,
    log_norm_M: Tensor,
    entropy_M: Tensor,
    grad_logprob_M: Tensor,
    grad_entropy_M: Tensor,
) -> None:
    is_watched_only = not grad_entropy_M.any()
    for now in parts(logits_MV, _LOGIT_ELEMENTS):
        log_p = _divided(logits_MV[now], divisor_M[now]).sub_(log_norm_M[now, None])
        given = grad_logprob_M[now, None]
        if is_watched_only:
            grad = log_p.exp_().mul_(-given)
        else:
            weight = (log_p + entropy_M[now, None]).mul_(grad_entropy_M[now, None]).add_(given)
            grad = log_p.exp_().mul_(weight).neg_()
        logits_MV[now] = grad.scatter_add_(1, target_M[now, None], given)


def parts(rows_MD: Tensor, max_elements: int) -> Iterator[slice]:
    """Slices of the rows, each of at most so many elements, or of one row."""
    size = max(1, max_elements // rows_MD.shape[1])
    for first in range(0, len(rows_MD), size):
        yield slice(first, min(first + size, len(rows_MD)))


def _divided(logits: Tensor, divisor: Tensor) -> Tensor:
    """A new float32 tensor."""
    wide = logits.to(torch.float32, copy=True)
    return wide if bool((divisor == 1).all()) else wide.div_(divisor[:, None])
