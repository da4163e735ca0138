"""Layers of a transformer with a backward pass of their own: less memory, fewer passes over it.

On the CPU, what a layer computes besides its matrix products is bound by memory. These layers give
the bits of the ones they replace; for the backward pass they keep what goes into them, and work on
so many rows at a time as the cache holds.

Shape letters: M = tokens, D = hidden size, F = intermediate size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, silu

_CACHE_ELEMENTS = 1 << 17  # float32 values of one operand that are worked on at a time
_PROBE_ROWS = 8


def make_lean_inplace(model: nn.Module) -> int:
    """Replace RMS norms and gated MLPs of ``model``; how many were.

    A layer is replaced only if its replacement gives the same bits on a probe: what is named alike
    and computes something else stays as it is. Names of parameters stay too.
    """
    found = [
        (parent, name, lean)
        for parent in model.modules()
        for name, child in parent.named_children()
        if (lean := _lean(child)) is not None
    ]
    for parent, name, lean in found:
        setattr(parent, name, lean)
    return len(found)


class LeanRMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)``, the mean in float32 (Zhang & Sennrich, 2019)."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = eps

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = _RMSNorm.apply(hidden, self.weight, self.variance_epsilon)
        return out


class LeanGatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` without biases (Shazeer, 2020: SwiGLU)."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down

    def forward(self, hidden: Tensor) -> Tensor:
        weights = (self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
        out: Tensor = _GatedMLP.apply(hidden, *weights)
        return out


def _lean(module: nn.Module) -> nn.Module | None:
    """A lean module that computes what ``module`` does; None if there is none."""
    lean: nn.Module
    if isinstance(module, (LeanRMSNorm, LeanGatedMLP)):
        return None
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        weight = module.weight
        if not isinstance(weight, nn.Parameter):
            return None
        width = len(weight)
        lean = LeanRMSNorm(weight, float(module.variance_epsilon))  # type: ignore[arg-type]  # a number
    elif type(module).__name__.endswith("MLP"):
        parts = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
        if not all(type(part) is nn.Linear and part.bias is None for part in parts):
            return None
        lean = LeanGatedMLP(*parts)  # type: ignore[arg-type]  # as just seen
        width = parts[0].in_features  # type: ignore[union-attr]
    else:
        return None
    return lean.train(module.training) if _is_same(module, lean, width) else None


@torch.no_grad()
def _is_same(module: nn.Module, lean: nn.Module, width: int) -> bool:
    parameter = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(1, _PROBE_ROWS, width, generator=generator)
    probe = probe.to(parameter.device, parameter.dtype)
    return torch.equal(module(probe), lean(probe))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:  # autograd's ctx
        hidden_MD = hidden.reshape(-1, hidden.shape[-1])
        out_MD = torch.empty_like(hidden_MD)
        scale_M1 = hidden_MD.new_empty(len(hidden_MD), 1, dtype=torch.float32)
        for now in _parts(hidden_MD):
            wide = hidden_MD[now].to(torch.float32, copy=True)
            scale_M1[now] = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
            torch.mul(weight, wide.mul_(scale_M1[now]).to(hidden.dtype), out=out_MD[now])
        ctx.save_for_backward(hidden_MD, weight, scale_M1)
        return out_MD.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden_MD, weight, scale_M1 = ctx.saved_tensors
        grad_MD = grad.reshape(hidden_MD.shape)
        found_MD = torch.empty_like(hidden_MD)
        wide_D = weight.float()
        grad_D = torch.zeros_like(wide_D)
        for now in _parts(hidden_MD):
            unit = hidden_MD[now].to(torch.float32, copy=True).mul_(scale_M1[now])
            own = grad_MD[now].to(torch.float32, copy=True)
            product = own * unit
            grad_D += product.sum(dim=0)
            along = torch.mv(product, wide_D).div_(len(wide_D))
            own.mul_(wide_D).addcmul_(unit, along[:, None], value=-1).mul_(scale_M1[now])
            found_MD[now] = own
        grad_weight = grad_D.to(weight.dtype) if ctx.needs_input_grad[1] else None
        return found_MD.view_as(grad), grad_weight, None


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor
    ) -> Tensor:
        hidden_MD = hidden.reshape(-1, hidden.shape[-1])
        gate_MF, up_MF = linear(hidden_MD, gate_FD), linear(hidden_MD, up_FD)
        ctx.save_for_backward(hidden_MD, gate_MF, up_MF, gate_FD, up_FD, down_DF)
        return linear(silu(gate_MF).mul_(up_MF), down_DF).view(*hidden.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MD, gate_MF, up_MF, gate_FD, up_FD, down_DF = ctx.saved_tensors
        grad_MD = grad.reshape(-1, grad.shape[-1])
        _, *wants = ctx.needs_input_grad
        active_MF = silu(gate_MF)
        grad_down = grad_MD.t() @ (active_MF * up_MF) if wants[2] else None
        inner_MF = grad_MD @ down_DF
        grad_up_MF = active_MF.mul_(inner_MF)
        inner_MF.mul_(up_MF)
        grad_gate_MF = torch.ops.aten.silu_backward(inner_MF, gate_MF)
        grad_hidden = (grad_gate_MF @ gate_FD).addmm_(grad_up_MF, up_FD)
        grad_gate = grad_gate_MF.t() @ hidden_MD if wants[0] else None
        grad_up = grad_up_MF.t() @ hidden_MD if wants[1] else None
        return grad_hidden.view(*grad.shape[:-1], -1), grad_gate, grad_up, grad_down


def _parts(rows_MD: Tensor) -> Iterator[slice]:
    size = max(1, _CACHE_ELEMENTS // rows_MD.shape[1])
    for first in range(0, len(rows_MD), size):
        yield slice(first, min(first + size, len(rows_MD)))
