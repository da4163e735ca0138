"""The kernels of this package by compiled C++, on all PyTorch threads of the caller.

They take tensors that `are_fit`. What each computes says `trinity.common.models.kernels`.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trinity.common.models.kernels.library import library

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_BLOCK = 64  # rows whose share of a weight's gradient is added up in one go


def are_fit(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors: of one dtype they know, on the CPU, contiguous."""
    dtype = tensors[0].dtype
    return (
        dtype in _DTYPES
        and all(t.device.type == "cpu" and t.dtype == dtype and t.is_contiguous() for t in tensors)
        and library() is not None
    )


def rms_norm(rows_MD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, scales = torch.empty_like(rows_MD), floats(len(rows_MD))
    sizes = (ctypes.c_long(rows_MD.shape[0]), ctypes.c_long(rows_MD.shape[1]), ctypes.c_float(eps))
    run("rms_norm", rows_MD.dtype, rows_MD, weight_D, out, scales, *sizes)
    return out, scales


def rms_norm_backward(
    grad_MD: Tensor, rows_MD: Tensor, weight_D: Tensor, scales_M: Tensor
) -> tuple[Tensor, Tensor]:
    num_rows, width = rows_MD.shape
    found_MD = torch.empty_like(rows_MD)
    parts = floats(-(-num_rows // _BLOCK), width)
    sizes = (ctypes.c_long(num_rows), ctypes.c_long(width), ctypes.c_long(_BLOCK))
    given = (grad_MD, rows_MD, weight_D, scales_M)
    run("rms_norm_backward", rows_MD.dtype, *given, found_MD, parts, *sizes)
    return found_MD, parts.sum(dim=0)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    run("silu_mul", gate.dtype, gate, up, out, ctypes.c_long(gate.numel()))
    return out


def silu_mul_backward_inplace(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    out, gate_grad = torch.empty_like(gate), torch.empty_like(gate)
    run(
        "silu_mul_backward", gate.dtype, grad, gate, up, out, gate_grad, ctypes.c_long(gate.numel())
    )
    return out, gate_grad


def rotate_inplace(
    rows_MHD: Tensor, cosine_MD: Tensor, sine_MD: Tensor, is_gradient: bool
) -> Tensor:
    sizes = (ctypes.c_long(size) for size in rows_MHD.shape)
    given = (rows_MHD, cosine_MD, sine_MD, rows_MHD)
    run("rotate", rows_MHD.dtype, *given, *sizes, ctypes.c_int(is_gradient))
    return rows_MHD


def token_statistics(
    logits_MV: Tensor, divisor_M: Tensor, target_M: Tensor, wants_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    logprob, log_norm = floats(len(logits_MV)), floats(len(logits_MV))
    entropy = torch.zeros_like(logprob)
    given = (logits_MV, divisor_M, target_M, logprob, log_norm)
    sizes = (ctypes.c_long(logits_MV.shape[0]), ctypes.c_long(logits_MV.shape[1]))
    asked = entropy if wants_entropy else None
    run("token_statistics", logits_MV.dtype, *given, asked, *sizes)
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
    given = (divisor_M, target_M, log_norm_M, entropy_M, grad_logprob_M, grad_entropy_M)
    sizes = (ctypes.c_long(logits_MV.shape[0]), ctypes.c_long(logits_MV.shape[1]))
    run("logit_gradient", logits_MV.dtype, logits_MV, *given, *sizes)


def floats(*shape: int) -> Tensor:
    """Room for float32."""
    return torch.empty(shape, dtype=torch.float32)


def address(values: Tensor | None) -> int | None:
    """Of what it holds; None for none."""
    return None if values is None else values.data_ptr()


def run(name: str, dtype: torch.dtype, *arguments: Any) -> None:  # tensors and C numbers
    """Call a kernel; None is a null pointer."""
    given = [
        ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a or ctypes.c_void_p()
        for a in arguments
    ]
    _kernel(name, dtype)(*given, ctypes.c_int(torch.get_num_threads()))


@cache
def _kernel(name: str, dtype: torch.dtype) -> Any:  # a function of C
    found = library()
    assert found is not None, "are_fit was asked"
    address = ctypes.c_void_p.in_dll(found, f"{name}_{_DTYPES[dtype]}").value
    assert address is not None
    return ctypes.CFUNCTYPE(None)(address)
