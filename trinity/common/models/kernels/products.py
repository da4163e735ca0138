"""Products of bfloat16 matrices on the CPU: by compiled kernels where they beat PyTorch's.

That is where the processor multiplies bfloat16 vectors (AVX-512 BF16) but has no matrix tiles.
There a row of a product has the same bits whatever rows are beside it. Elsewhere, and for other
dtypes, PyTorch's products do the work.

Shape letters: M = rows (tokens), K = depth, N = columns of the result.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trinity.common.models.kernels.library import function, library

_COLUMNS = 48  # of a panel, as the compiled kernels pack them
_PACKED, _TRANSPOSED, _PLAIN = range(3)
_PIECE_ELEMENTS = 1 << 21  # of a transposed product that PyTorch makes at a time


def linear(rows: Tensor, weight: "Tensor | PackedWeight", bias_N: Tensor | None = None) -> Tensor:
    """``rows @ weight.T + bias``, without gradient; rows are [..., K], the weight [N, K]."""
    return linears(rows, (weight, bias_N))[0]


def linears(rows: Tensor, *layers: tuple["Tensor | PackedWeight", Tensor | None]) -> list[Tensor]:
    """`linear` of the same rows by several layers (weight and bias) in one go."""
    rows_MK = rows.reshape(-1, rows.shape[-1])
    if rows_MK.stride(1) != 1:
        rows_MK = rows_MK.contiguous()
    weights = [weight for weight, _ in layers]
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if not are_fit(rows_MK, *plain):
        assert len(plain) == len(layers), "who packs weights has rows that fit them"
        biases = (bias for _, bias in layers)
        pairs = zip(plain, biases, strict=True)
        return [torch.nn.functional.linear(rows, weight, bias) for weight, bias in pairs]
    found = [rows.new_empty(*rows.shape[:-1], weight.shape[0]) for weight in weights]
    _compute(
        len(rows_MK),
        *(
            _product(out, ((rows_MK, weight),), _TRANSPOSED, bias)
            if isinstance(weight, Tensor)
            else _product(out, ((rows_MK, weight.panels),), _PACKED, bias)
            for out, (weight, bias) in zip(found, layers, strict=True)
        ),
    )
    return found


def sum_of_products(*pairs: tuple[Tensor, Tensor]) -> Tensor:
    """The sum of ``rows_MK @ weight_KN`` over pairs, rounded once where the kernels do it."""
    if are_fit(*(tensor for pair in pairs for tensor in pair)):
        out = pairs[0][0].new_empty(len(pairs[0][0]), pairs[0][1].shape[1])
        _compute(len(out), _product(out, pairs, _PLAIN, None))
        return out
    (rows, weight), *others = pairs
    out = rows @ weight
    for rows, weight in others:
        out.addmm_(rows, weight)
    return out


def add_transposed_product(total_KN: Tensor, left_MK: Tensor, right_MN: Tensor) -> None:
    """``total += left.T @ right``; the total is float32 and takes sums that nothing rounded.

    On a CPU PyTorch's way makes some rows at a time: the product is never there as a whole. (On a
    GPU rows that begin at odd places would take kernels of a third of the speed.)
    """
    if total_KN.is_cuda:
        total_KN.add_(left_MK.t() @ right_MN)
        return
    if total_KN.is_contiguous() and are_fit(left_MK, right_MN):
        kernel = _kernel("add_transposed_product")
        left, right, total = left_MK.data_ptr(), right_MN.data_ptr(), total_KN.data_ptr()
        strides = (left_MK.stride(0), right_MN.stride(0), total_KN.stride(0))
        sizes = (len(left_MK), *total_KN.shape)
        kernel(left, strides[0], right, strides[1], total, strides[2], *sizes, _num_threads())
        return
    step = max(1, _PIECE_ELEMENTS // right_MN.shape[1])
    for first in range(0, len(total_KN), step):
        now = slice(first, first + step)
        total_KN[now].add_(left_MK[:, now].t() @ right_MN)


class PackedWeight:
    """A weight in the order in which the compiled kernels read it; products have the same bits.

    Attributes:
        shape: Of the weight.
        panels: What the kernels read.

    Args:
        weight_NK: In bfloat16, on the CPU; `are_fit` was asked.
    """

    def __init__(self, weight_NK: Tensor) -> None:
        self.shape = weight_NK.shape
        num_panels = -(-self.shape[0] // _COLUMNS)
        self.panels = weight_NK.new_empty(num_panels * _COLUMNS, self.shape[1])
        self.pack(weight_NK)

    def pack(self, weight_NK: Tensor) -> None:
        """Hold another weight of the shape."""
        weight_NK = weight_NK.contiguous()
        given = (weight_NK.data_ptr(), weight_NK.stride(0))
        _kernel("pack_panels")(*given, *self.shape, self.panels.data_ptr(), _num_threads())

    def unpacked(self) -> Tensor:
        """The weight as it was given: a copy."""
        words = self.panels.view(torch.int32).view(-1, self.shape[1] // 2, _COLUMNS)
        flat = words.transpose(1, 2).reshape(-1).view(torch.bfloat16)
        return flat[: self.shape.numel()].view(self.shape)


def are_fit(*matrices: Tensor) -> bool:
    """Whether the compiled kernels take these: bfloat16, on the CPU, of whole words along rows."""
    return (
        all(
            m.dtype is torch.bfloat16 and m.is_cpu and m.stride(1) == 1 and m.shape[1] % 2 == 0
            for m in matrices
        )
        and _has_products()
    )


class _Term(ctypes.Structure):
    _fields_ = (
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("left_row", ctypes.c_long),
        ("right_row", ctypes.c_long),
        ("depth", ctypes.c_long),
    )


class _Product(ctypes.Structure):
    _fields_ = (
        ("terms", ctypes.POINTER(_Term)),
        ("num_terms", ctypes.c_long),
        ("right", ctypes.c_int),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_row", ctypes.c_long),
        ("columns", ctypes.c_long),
    )


def _product(
    out: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], right: int, bias: Tensor | None
) -> _Product:
    """What fills ``out`` [..., N]."""
    terms = (_Term * len(pairs))(
        *(_Term(a.data_ptr(), b.data_ptr(), a.stride(0), b.stride(0), a.shape[1]) for a, b in pairs)
    )
    added, columns = None if bias is None else bias.data_ptr(), out.shape[-1]
    return _Product(terms, len(pairs), right, added, out.data_ptr(), columns, columns)


def _compute(num_rows: int, *products: _Product) -> None:
    given = (_Product * len(products))(*products)
    _kernel("compute_products")(given, len(products), num_rows, _num_threads())


@cache
def _has_products() -> bool:
    found = library()
    return found is not None and bool(ctypes.c_int.in_dll(found, "has_products").value)


_P, _L, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
_ARGUMENTS = {
    "compute_products": (_P, _L, _L, _I),
    "add_transposed_product": (_P, _L, _P, _L, _P, _L, _L, _L, _L, _I),
    "pack_panels": (_P, _L, _L, _L, _P, _I),
}


def _kernel(name: str) -> Any:  # a function of C
    return function(name, *_ARGUMENTS[name])


def _num_threads() -> int:
    return torch.get_num_threads()
