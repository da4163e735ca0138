"""Linear layers whose weights lie as the CPU's matrix kernels read them.

Decoding multiplies few rows by every weight; putting a weight into the kernels' order at each of
these products costs a third of their time. The bits are those of the plain layer.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_PROBE_ROWS = 64  # rows of a usual decoding step


class PackedLinear(nn.Module):
    """An `nn.Linear` that computes with a packed copy of its weight.

    ``weight`` and ``bias`` stay the layer's parameters; `repack` follows when they change.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.repack()

    @torch.no_grad()
    def repack(self) -> None:
        """Take up the weight as it is now."""
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self._packed: Tensor = reorder(self.weight.detach(), _PROBE_ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "none", [], ""
        )
        return out


def pack_linears_inplace(model: nn.Module, output_layer: nn.Module | None) -> int:
    """Replace the linear layers of a bfloat16 model on the CPU; how many were.

    Layers stay as they are where this PyTorch can't pack or the bits would differ. So does the
    ``output_layer``: it is too large to be copied for what it would gain.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child is not output_layer and _is_packable(child)
    ]
    if not places or not _is_exact(places[0][2]):
        return 0
    for parent, name, child in places:
        setattr(parent, name, PackedLinear(child).train(child.training))
    return len(places)


def repack(model: nn.Module) -> None:
    """Have all packed layers of ``model`` take up their weights."""
    for module in packed_layers(model):
        module.repack()


def packed_layers(model: nn.Module) -> Iterator[PackedLinear]:
    """The packed layers of a model."""
    return (module for module in model.modules() if isinstance(module, PackedLinear))


def _is_packable(linear: nn.Linear) -> bool:
    return linear.weight.dtype == torch.bfloat16 and linear.weight.device.type == "cpu"


@torch.no_grad()
def _is_exact(linear: nn.Linear) -> bool:
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(_PROBE_ROWS, linear.in_features, generator=generator).to(torch.bfloat16)
    return torch.equal(PackedLinear(linear)(probe), linear(probe))
