"""Linear layers whose weights lie as the CPU's matrix kernels read them.

Decoding multiplies few rows by every weight; putting a weight into the kernels' order at each of
these products costs a third of their time. The bits are those of the plain layer.
"""

from collections import Counter

import torch
from torch import Tensor, nn

from trinity.common.models import kernels
from trinity.common.models.kernels.products import PackedWeight, are_fit
from trinity.common.models.lean import LeanLinear

_PROBE_ROWS = 64  # rows of a usual decoding step


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight is kept packed only, or also as it was.

    Without ``keeps_weight`` the parameter ``weight`` has the layer's name, shape and dtype, but no
    data (it is on "meta").
    """

    def __init__(self, linear: nn.Linear, keeps_weight: bool = False) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self._packed = (PackedWeight if are_fit(weight) else _OneDnnWeight)(weight)
        empty = nn.Parameter(linear.weight.to("meta"), requires_grad=False)
        self.weight = linear.weight if keeps_weight else empty
        self.bias = linear.bias

    @torch.no_grad()
    def pack(self, weight: Tensor) -> None:
        """Compute with ``weight`` from now on."""
        self._packed.pack(weight.detach())

    def unpacked(self) -> Tensor:
        """The weight as it was given, bit for bit: a copy."""
        return self._packed.unpacked()

    @property
    def factor(self) -> PackedWeight | None:
        """The weight as `kernels.linear` takes it, if it does."""
        return self._packed if isinstance(self._packed, PackedWeight) else None

    def forward(self, rows: Tensor) -> Tensor:
        if isinstance(self._packed, PackedWeight):
            return kernels.linear(rows, self._packed, self.bias)
        return self._packed.linear(rows, self.bias)


class _OneDnnWeight:
    """A weight as PyTorch's library of products wants it, where `PackedWeight` is not for it."""

    def __init__(self, weight: Tensor) -> None:
        self.pack(weight)

    def pack(self, weight: Tensor) -> None:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self._packed: Tensor = reorder(weight, _PROBE_ROWS)

    def unpacked(self) -> Tensor:
        return self._packed.to_dense()

    def linear(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        compute = torch.ops.mkldnn._linear_pointwise
        out: Tensor = compute(rows, self._packed, bias, "none", [], "")
        return out


def pack_linears_inplace(model: nn.Module, output_layer: nn.Module | None) -> int:
    """Replace the linear layers of a bfloat16 model on the CPU; how many were.

    Layers stay as they are where this PyTorch can't pack or the bits would differ, and those that
    share their weight; only the ``output_layer`` is packed though its weight is the embedding's
    too, which is kept.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
        and type(child) in (nn.Linear, LeanLinear)
        and _is_packable(child)
    ]
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    places = [p for p in places if uses[id(p[2].weight)] == 1 or p[2] is output_layer]
    if not places or not _is_exact(places[0][2]):
        return 0
    for parent, name, child in places:
        packed = PackedLinear(child, keeps_weight=uses[id(child.weight)] > 1)
        setattr(parent, name, packed.train(child.training))
    _leave_file(model)
    return len(places)


@torch.no_grad()
def pack_shared_weights(model: nn.Module) -> None:
    """Pack those weights anew that are kept elsewhere too, after they have changed."""
    for module in model.modules():
        if isinstance(module, PackedLinear) and not module.weight.is_meta:
            module.pack(module.weight)


@torch.no_grad()
def _leave_file(model: nn.Module) -> None:
    """Move what is left out of the mapped file of weights, whose pages would stay resident."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.clone()


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    """The layers of a model whose weight is kept packed only, by the name of the weight."""
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear) and module.weight.is_meta
    }


def _is_packable(linear: nn.Linear) -> bool:
    return linear.weight.dtype == torch.bfloat16 and linear.weight.device.type == "cpu"


@torch.no_grad()
def _is_exact(linear: nn.Linear) -> bool:
    if not are_fit(linear.weight) and not (
        torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return False
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(_PROBE_ROWS, linear.in_features, generator=generator).to(torch.bfloat16)
    packed = PackedLinear(linear)
    is_kept = torch.equal(packed.unpacked(), linear.weight)
    return is_kept and torch.equal(packed(probe), linear(probe))
