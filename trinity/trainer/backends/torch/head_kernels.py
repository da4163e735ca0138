"""The elementwise work of the output layer on a GPU: one pass over the logits each way.

Shape letters: C = tokens of a chunk, V = vocabulary.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

_BLOCK = 4096
_NUM_WARPS = 8


def token_statistics(
    raw_CV: Tensor, divisor: Tensor, target: Tensor, wants_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target, log of the normaliser, and entropy (0 if not wanted).

    Logits are ``raw_CV / divisor``, in float32.
    """
    count, vocabulary = raw_CV.shape
    logprob, log_norm, entropy = raw_CV.new_zeros(3, count, dtype=torch.float32)
    _kernels()[0][(count,)](
        raw_CV,
        divisor.contiguous(),
        target.contiguous(),
        logprob,
        log_norm,
        entropy,
        vocabulary,
        wants_entropy,
        _BLOCK,
        num_warps=_NUM_WARPS,
    )
    return logprob, log_norm, entropy


def logit_gradient_inplace(
    raw_CV: Tensor,
    divisor: Tensor,
    target: Tensor,
    log_norm: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
) -> None:
    """Put ``g (1[target] - p) - e p (log p + H)`` in the place of the products."""
    count, vocabulary = raw_CV.shape
    per_token = (divisor, target, log_norm, entropy, grad_logprob, grad_entropy)
    _kernels()[1][(count,)](
        raw_CV, *(t.contiguous() for t in per_token), vocabulary, _BLOCK, num_warps=_NUM_WARPS
    )


@cache
def _kernels() -> tuple[Any, Any]:
    """The kernels, compiled where they are first called: Triton is only there with CUDA."""
    from trinity.trainer.backends.torch import triton_head

    return triton_head.statistics, triton_head.gradient
