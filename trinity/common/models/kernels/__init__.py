"""Fused kernels of a transformer's layers on the CPU, forward and backward.

Compiled C++ (`_native`) where a compiler is installed and the tensors are of float32 or bfloat16;
else PyTorch's operations (`_plain`), which give the same numbers more slowly.

Shape letters: M = rows (tokens), D = width of a row, H = heads, V = vocabulary.
"""

from types import ModuleType

from torch import Tensor

from trinity.common.models.kernels import _native, _plain
from trinity.common.models.kernels.products import (
    PackedWeight,
    add_transposed_product,
    linear,
    linears,
    sum_of_products,
)

__all__ = [
    "PackedWeight",
    "add_transposed_product",
    "linear",
    "linears",
    "logit_gradient_inplace",
    "rms_norm",
    "rms_norm_backward",
    "rotate_inplace",
    "silu_mul",
    "silu_mul_backward_inplace",
    "sum_of_products",
    "token_statistics",
]


def rms_norm(rows_MD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``weight * x / sqrt(mean(x^2) + eps)``, and [M] the rows' scales in float32.

    RMSNorm of Zhang & Sennrich (2019); the normalised row is rounded before the weight comes.
    """
    found: tuple[Tensor, Tensor] = _kernels(rows_MD, weight_D).rms_norm(rows_MD, weight_D, eps)
    return found


def rms_norm_backward(
    grad_MD: Tensor, rows_MD: Tensor, weight_D: Tensor, scale_M: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients at the rows, and at the weight in float32."""
    kernels = _kernels(grad_MD, rows_MD, weight_D)
    found: tuple[Tensor, Tensor] = kernels.rms_norm_backward(grad_MD, rows_MD, weight_D, scale_M)
    return found


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``: SwiGLU of Shazeer (2020)."""
    found: Tensor = _kernels(gate, up).silu_mul(gate, up)
    return found


def silu_mul_backward_inplace(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """``silu(gate) * up`` again, and the gradient at ``gate``; ``grad`` becomes that at ``up``."""
    kernels = _kernels(grad, gate, up)
    found: tuple[Tensor, Tensor] = kernels.silu_mul_backward_inplace(grad, gate, up)
    return found


def rotate_inplace(
    rows_MHD: Tensor, cosine_MD: Tensor, sine_MD: Tensor, is_gradient: bool = False
) -> Tensor:
    """Rotary position embedding (Su et al., 2021) in the place of rows of heads, and these.

    Args:
        is_gradient: The rows are the gradient at the rotated ones; that at the plain ones comes.
    """
    kernels = _kernels(rows_MHD, cosine_MD, sine_MD)
    found: Tensor = kernels.rotate_inplace(rows_MHD, cosine_MD, sine_MD, is_gradient)
    return found


def token_statistics(
    logits_MV: Tensor, divisor_M: Tensor, target_M: Tensor, wants_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the softmax of ``logits / divisor``: log-probability of the target, log-norm, entropy.

    All [M] in float32; entropies are 0 if not wanted.
    """
    kernels = _kernels(logits_MV)
    found: tuple[Tensor, Tensor, Tensor] = kernels.token_statistics(
        logits_MV, divisor_M, target_M, wants_entropy
    )
    return found


def logit_gradient_inplace(
    logits_MV: Tensor,
    divisor_M: Tensor,
    target_M: Tensor,
    log_norm_M: Tensor,
    entropy_M: Tensor,
    grad_logprob_M: Tensor,
    grad_entropy_M: Tensor,
) -> None:
    """Put the gradient at the logits in their place: ``g (1[target] - p) - e p (log p + H)``.

    ``g`` and ``e`` are the gradients at log-probability and entropy, divided by the divisor.
    """
    per_token = (divisor_M, target_M, log_norm_M, entropy_M, grad_logprob_M, grad_entropy_M)
    _kernels(logits_MV).logit_gradient_inplace(logits_MV, *per_token)


def _kernels(*tensors: Tensor) -> ModuleType:
    return _native if _native.are_fit(*tensors) else _plain
