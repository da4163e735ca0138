"""A decoder layer's forward and backward pass, each one call of a compiled kernel: bfloat16.

The bits are those of the layers' modules, without the time that Python takes between two kernels,
whose instructions the kernels drive out of the caches.

Shape letters: M = tokens, D = hidden size, W = head size.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trinity.common.models.kernels import _native
from trinity.common.models.kernels.attention import (
    AttentionTasks,
    KeyLayout,
    lists_of,
    shape_of,
)
from trinity.common.models.kernels.decoder import DecoderSizes
from trinity.common.models.kernels.library import function

_LINEARS = ("query", "key", "value", "mixed", "gate", "up", "down")
_NORMS = ("input_norm", "query_norm", "key_norm", "inner_norm")
_BLOCK = 64  # rows whose share of a norm's gradient is added up in one go
_LINE = 32  # pieces of memory begin at multiples of it


@dataclass(frozen=True)
class Trained:
    """A weight, and where its gradient adds up in float32; None where there is none."""

    weight: Tensor | None
    gradient: Tensor | None = None


class TrainedLayer:
    """A layer whose weights, and their gradients' places, stay where they are while it is used.

    Args:
        linears: Weight and bias of the projections to queries, keys and values, of what attention
            gives, gate, up and down.
        norms: Of the input, heads of queries and of keys (no weight: not normalised), and the MLP's
            input.
        window: Keys that a query sees; None: all.
    """

    def __init__(
        self,
        linears: Sequence[tuple[Trained, Trained]],
        norms: Sequence[Trained],
        sizes: DecoderSizes,
        window: int | None,
    ) -> None:
        self.sizes = sizes
        self._window = window
        self._held = (linears, norms)
        fields = {
            **{
                name: _Linear(*map(_native.address, (w.weight, b.weight, w.gradient, b.gradient)))
                for name, (w, b) in zip(_LINEARS, linears, strict=True)
            },
            **{
                name: _Norm(_native.address(norm.weight), _native.address(norm.gradient))
                for name, norm in zip(_NORMS, norms, strict=True)
            },
        }
        self._layer = _Layer(**fields)
        self._norms_heads = [norm.weight is not None for norm in norms[1:3]]

    def forward(
        self, hidden_MD: Tensor, cosine_MW: Tensor, sine_MW: Tensor, tasks: AttentionTasks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's output [M, D], and what `backward` needs: values, and scales in float32."""
        rows = len(hidden_MD)
        kept, scales = self._room_kept(hidden_MD)
        room = _room(hidden_MD, rows * self.sizes.width, rows * self.sizes.inner)
        out = torch.empty_like(hidden_MD)
        given = (hidden_MD, cosine_MW, sine_MW)
        self._call("layer_forward", given, tasks, (), (kept, scales, room, out))
        return out, kept, scales

    def backward(
        self,
        grad_MD: Tensor,
        hidden_MD: Tensor,
        cosine_MW: Tensor,
        sine_MW: Tensor,
        tasks: AttentionTasks,
        kept: Tensor,
        scales: Tensor,
    ) -> Tensor:
        """The gradient at ``hidden_MD`` from that at the output; those at weights add up."""
        sizes, rows = self.sizes, len(hidden_MD)
        heads, kv_heads = rows * sizes.heads, rows * sizes.kv_heads
        wide = (*[rows * sizes.width] * 3, *[rows * sizes.inner] * 3)
        of_kv_heads = [kv_heads * sizes.head_size] * 2
        room = _room(hidden_MD, *wide, *[heads * sizes.head_size] * 2, *of_kv_heads)
        parts = max(_blocks(rows) * sizes.width, _blocks(heads) * sizes.head_size)
        sums = _room(scales, *of_kv_heads, parts)
        at_hidden = torch.empty_like(hidden_MD)
        trees_end = tasks.trees_end
        assert trees_end is not None, "tasks for gradients are ordered by trees"
        given = (hidden_MD, cosine_MW, sine_MW)
        trees = (trees_end.data_ptr(), len(trees_end))
        used = (kept, scales, grad_MD, at_hidden, room, sums)
        self._call("layer_backward", given, tasks, trees, used)
        return at_hidden

    def _room_kept(self, like: Tensor) -> tuple[Tensor, Tensor]:
        sizes, rows = self.sizes, len(like)
        heads, kv_heads = rows * sizes.heads, rows * sizes.kv_heads
        wide = [heads, kv_heads, kv_heads, heads]
        narrow = [rows, rows, heads]
        for is_normed, count in zip(self._norms_heads, (heads, kv_heads), strict=True):
            if is_normed:
                wide.append(count)
                narrow.append(count)
        values = [count * sizes.head_size for count in wide]
        kept = _room(like, *values, rows * sizes.width, *[rows * sizes.inner] * 2)
        return kept, _room(like.new_empty(0, dtype=torch.float32), *narrow)

    def _call(
        self,
        name: str,
        given: Sequence[Tensor],
        tasks: AttentionTasks,
        trees: Sequence[int],
        used: Sequence[Tensor],
    ) -> None:
        sizes = self.sizes
        counts = (sizes.width, sizes.inner, sizes.heads, sizes.kv_heads, sizes.head_size)
        heads = (sizes.heads, sizes.kv_heads)
        stride = sizes.kv_heads * sizes.head_size
        layout = KeyLayout(stride, stride, sizes.head_size)
        shape = shape_of(heads, tasks, layout, sizes.scale, self._window)
        function(name, *_ARGUMENTS[name])(
            ctypes.byref(self._layer),
            ctypes.byref(_Sizes(len(given[0]), *counts, sizes.eps)),
            *(tensor.data_ptr() for tensor in given),
            ctypes.byref(lists_of(tasks)),
            ctypes.byref(shape),
            *trees,
            *(tensor.data_ptr() for tensor in used),
            torch.get_num_threads(),
        )


def _room(like: Tensor, *counts: int) -> Tensor:
    """Memory for pieces of so many numbers."""
    return like.new_empty(sum(-(-count // _LINE) * _LINE for count in counts))


def _blocks(rows: int) -> int:
    return -(-rows // _BLOCK)


class _Linear(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("weight", "bias", "gradient", "bias_gradient")]


class _Norm(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("weight", "gradient")]


class _Layer(ctypes.Structure):
    _fields_ = [*((name, _Linear) for name in _LINEARS), *((name, _Norm) for name in _NORMS)]


class _Sizes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("rows", "width", "inner", "heads", "kv_heads")),
        ("head_size", ctypes.c_long),
        ("eps", ctypes.c_float),
    ]


_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
_ARGUMENTS = {
    "layer_forward": (*[_POINTER] * 11, _INT),
    "layer_backward": (*[_POINTER] * 8, _LONG, *[_POINTER] * 6, _INT),
}
