"""Draw tokens from logits on the CPU by a compiled kernel, with the log-probabilities of a trainer.

Shape letters: M = rows, V = vocabulary.
"""

import ctypes

import torch
from torch import Tensor

from trinity.common.models.kernels import _native

fits = _native.are_fit  # whether the kernel takes these logits


def draw_tokens(
    logits_MV: Tensor, divisor_M: Tensor, uniform_M: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A token of each row's softmax of ``logits / divisor``, its log-probability, and the log-norm.

    The latter two are those of `kernels.token_statistics`, bit for bit.

    Args:
        uniform_M: In (0, 1), in float64: the token is the first at which the running sum of
            probabilities reaches it.
    """
    token = torch.empty(len(logits_MV), dtype=torch.int64)
    logprob, log_norm = _native.floats(len(logits_MV)), _native.floats(len(logits_MV))
    given = (logits_MV, divisor_M, uniform_M, token, logprob, log_norm)
    sizes = (ctypes.c_long(logits_MV.shape[0]), ctypes.c_long(logits_MV.shape[1]))
    _native.run("draw_tokens", logits_MV.dtype, *given, *sizes)
    return token, logprob, log_norm
