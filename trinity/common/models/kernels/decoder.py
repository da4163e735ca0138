"""All layers of a decoder in one call of a compiled kernel: bfloat16, without gradient.

The bits are those of the layers' modules, without the time that Python takes between two kernels.

Shape letters: M = tokens, D = hidden size, W = head size.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trinity.common.models.kernels import _native
from trinity.common.models.kernels.attention import (
    AttentionTasks,
    KeyLayout,
    Shape,
    TaskLists,
    lists_of,
    shape_of,
)
from trinity.common.models.kernels.library import function

_EVERY_KEY = 1 << 40
_PRODUCTS = ("query", "key", "value", "mixed", "gate", "up", "down")
_NORMS = ("input_norm", "query_norm", "key_norm", "inner_norm")
_STORES = ("sample_keys", "sample_values", "prompt_keys", "prompt_values")


@dataclass(frozen=True)
class LayerWeights:
    """What one layer computes with.

    Args:
        products: Panels of a `PackedWeight` and bias for queries, keys, values, what attention
            gives, gate, up and down.
        norms: Of the input, heads of queries and of keys (None: not normalised), and the MLP's
            input.
        window: Keys that a query sees; None: all.
    """

    products: Sequence[tuple[Tensor, Tensor | None]]
    norms: Sequence[Tensor | None]
    window: int | None


@dataclass(frozen=True)
class DecoderSizes:
    """What all layers have in common."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    eps: float
    scale: float


@dataclass(frozen=True)
class DecoderPart:
    """Tokens one after the other that attend to keys and values ``stored`` for each layer."""

    tasks: AttentionTasks
    num_tokens: int
    stored: Sequence[tuple[Tensor, Tensor]]


class Decoder:
    """Layers whose weights stay where they are in memory."""

    def __init__(self, layers: Sequence[LayerWeights], sizes: DecoderSizes) -> None:
        self.sizes = sizes
        self._weights = layers
        self._layers = (_Layer * len(layers))(*(_Layer(**_fields(layer)) for layer in layers))

    def run_inplace(
        self,
        hidden_MD: Tensor,
        cosine_MW: Tensor,
        sine_MW: Tensor,
        samples: DecoderPart,
        prompts: DecoderPart,
    ) -> None:
        """Hidden states before the first layer become those after the last.

        The first tokens are those of ``samples``, then come those of ``prompts``; others may
        follow, which attend to nothing.
        """
        sizes = self.sizes
        parts = [self._part(*given) for given in ((samples, _STORES[:2]), (prompts, _STORES[2:]))]
        heads = (sizes.heads + sizes.kv_heads) * sizes.head_size
        room = hidden_MD.new_empty(len(hidden_MD) * 2 * (sizes.width + heads + sizes.inner))
        count = (len(self._weights), sizes.width, sizes.inner, sizes.heads, sizes.kv_heads)
        _decode()(
            *(tensor.data_ptr() for tensor in (hidden_MD, cosine_MW, sine_MW)),
            len(hidden_MD),
            self._layers,
            ctypes.byref(_Sizes(*count, sizes.head_size, sizes.eps)),
            *map(ctypes.byref, parts),
            room.data_ptr(),
            torch.get_num_threads(),
        )

    def _part(self, part: DecoderPart, names: Sequence[str]) -> "_Part":
        if not part.num_tokens:
            return _Part()
        for layer, stored in zip(self._layers, part.stored, strict=True):
            for name, tensor in zip(names, stored, strict=True):
                setattr(layer, name, tensor.data_ptr())
        layout, sizes = KeyLayout.of_rows(part.stored[0][0]), self.sizes
        shape = shape_of((sizes.heads, sizes.kv_heads), part.tasks, layout, sizes.scale, None)
        return _Part(ctypes.pointer(lists_of(part.tasks)), ctypes.pointer(shape), part.num_tokens)


class _Linear(ctypes.Structure):
    _fields_ = (("packed", ctypes.c_void_p), ("bias", ctypes.c_void_p))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in _PRODUCTS),
        *((name, ctypes.c_void_p) for name in _NORMS),
        ("window", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in _STORES),
    )


class _Sizes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("num_layers", "width", "inner")),
        *((name, ctypes.c_long) for name in ("heads", "kv_heads", "head_size")),
        ("eps", ctypes.c_float),
    )


class _Part(ctypes.Structure):
    _fields_ = (
        ("tasks", ctypes.POINTER(TaskLists)),
        ("shape", ctypes.POINTER(Shape)),
        ("num_tokens", ctypes.c_long),
    )


def _fields(layer: LayerWeights) -> dict[str, Any]:
    linears = [_Linear(*map(_native.address, given)) for given in layer.products]
    return {
        **dict(zip(_PRODUCTS, linears, strict=True)),
        **dict(zip(_NORMS, map(_native.address, layer.norms), strict=True)),
        "window": layer.window or _EVERY_KEY,
    }


def _decode() -> Any:  # a function of C
    pointer, number = ctypes.c_void_p, ctypes.c_long
    return function("decode", *[pointer] * 3, number, *[pointer] * 5, ctypes.c_int)
