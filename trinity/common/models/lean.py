"""Layers of a transformer whose elementwise work is fused, for the CPU, where memory bounds it.

Engine and trainer compute with the same ones, so that a token is trained with the bits it was
sampled with. For the backward pass they keep what goes into them.

Shape letters: M = tokens, D = hidden size, F = intermediate size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from trinity.common.models import kernels

_PROBE_ROWS = 8
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make_lean_inplace(model: nn.Module) -> int:
    """Replace RMS norms and gated MLPs of ``model``; how many were.

    A layer is replaced only if its replacement gives the same numbers on a probe: what is named
    alike and computes something else stays as it is. Names of parameters stay too.
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
        if not torch.is_grad_enabled():
            active = kernels.silu_mul(self.gate_proj(hidden), self.up_proj(hidden))
            return self.down_proj(active)  # type: ignore[no-any-return]  # of modules, any
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
    wanted, found = module(probe).float(), lean(probe).float()
    gap = torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted)
    return bool(gap < _TOLERANCES.get(probe.dtype, 0))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:  # autograd's ctx
        hidden_MD = _rows(hidden)
        out_MD, scale_M = kernels.rms_norm(hidden_MD, weight, eps)
        ctx.save_for_backward(hidden_MD, weight, scale_M)
        return out_MD.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        found_MD, grad_D = kernels.rms_norm_backward(_rows(grad), *ctx.saved_tensors)
        grad_weight = grad_D.to(grad.dtype) if ctx.needs_input_grad[1] else None
        return found_MD.view_as(grad), grad_weight, None


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor
    ) -> Tensor:
        hidden_MD = _rows(hidden)
        gate_MF, up_MF = linear(hidden_MD, gate_FD), linear(hidden_MD, up_FD)
        ctx.save_for_backward(hidden_MD, gate_MF, up_MF, gate_FD, up_FD, down_DF)
        return linear(kernels.silu_mul(gate_MF, up_MF), down_DF).view(*hidden.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MD, gate_MF, up_MF, gate_FD, up_FD, down_DF = ctx.saved_tensors
        grad_MD = _rows(grad)
        _, *wants = ctx.needs_input_grad
        inner_MF = grad_MD @ down_DF
        active_MF, gate_grad_MF = kernels.silu_mul_backward_inplace(inner_MF, gate_MF, up_MF)
        grad_down = grad_MD.t() @ active_MF if wants[2] else None
        grad_hidden = (gate_grad_MF @ gate_FD).addmm_(inner_MF, up_FD)
        grad_gate = gate_grad_MF.t() @ hidden_MD if wants[0] else None
        grad_up = inner_MF.t() @ hidden_MD if wants[1] else None
        return grad_hidden.view(*grad.shape[:-1], -1), grad_gate, grad_up, grad_down


def _rows(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1]).contiguous()
