"""Layers of a transformer whose elementwise work is fused, for the CPU, where memory bounds it.

Engine and trainer compute with the same ones, so that a token is trained with the bits it was
sampled with. For the backward pass they keep what goes into them.

Shape letters: M = tokens, D = hidden size, F = intermediate size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trinity.common.models import kernels
from trinity.common.models.gradients import product_gradient
from trinity.common.models.kernels.decoder import DecoderSizes

_PROBE_ROWS = 8
_ATTENTIONS = {"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"}
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make_lean_inplace(model: nn.Module) -> int:
    """Replace linear layers, RMS norms, gated MLPs and attentions of ``model``; how many were.

    A layer is replaced only if its replacement gives the same numbers on a probe: what is named
    alike and computes something else stays as it is. Names of parameters stay too.
    """
    linears = _replace(model, _lean_linear)  # first: the others take them over
    others = _replace(model, _lean)
    return linears + others + _replace(model, _lean)  # norms of heads, which attentions took over


class LeanLinear(nn.Linear):
    """A linear layer by `kernels.linear`; its gradients in the dtype of the weight."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias

    @property
    def factor(self) -> Tensor:
        """The weight as `kernels.linear` takes it."""
        return self.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return _linears(hidden, self)[0]


class LeanRMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)``, the mean in float32 (Zhang & Sennrich, 2019)."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = eps

    def forward(self, hidden: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            out_MD, _ = kernels.rms_norm(_rows(hidden), self.weight, self.variance_epsilon)
            return out_MD.view_as(hidden)
        out: Tensor = _RMSNorm.apply(hidden, self.weight, self.variance_epsilon)
        return out


class LeanGatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` without biases (Shazeer, 2020: SwiGLU)."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down

    def forward(self, hidden: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            gate, up = _linears(hidden, self.gate_proj, self.up_proj)
            out: Tensor = self.down_proj(kernels.silu_mul(gate, up))
            return out
        weights = (self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
        out = _GatedMLP.apply(hidden, *weights)
        return out


class LeanAttention(nn.Module):
    """Attention of queries and keys with rotary embeddings; how they attend is the model's choice.

    Args:
        attention: What it replaces: a module of transformers in `_ATTENTIONS`.
    """

    def __init__(self, attention: Any) -> None:  # modules have no typed attributes
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj = attention.o_proj
        self.q_norm: nn.Module | None = getattr(attention, "q_norm", None)
        self.k_norm: nn.Module | None = getattr(attention, "k_norm", None)
        self.config = attention.config
        self.layer_idx: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.num_key_value_groups: int = attention.num_key_value_groups
        self.scaling: float = attention.scaling
        self.attention_dropout: float = attention.attention_dropout
        self.is_causal = True
        is_mistral = type(attention).__name__ == "MistralAttention"
        holder = self.config if is_mistral else attention
        self.sliding_window: int | None = getattr(holder, "sliding_window", None)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **options: Any,  # what the model was called with, for the attention function
    ) -> tuple[Tensor, Tensor | None]:
        """[B, N, D] hidden states in and out, and what the attention function says of weights."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = _linears(hidden_states, self.q_proj, self.k_proj, self.v_proj)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query.view(shape)), self.k_norm(key.view(shape))
        cosine, sine = (_rows(part.expand(*shape[:-2], -1)) for part in position_embeddings)
        rotate = _Rotated.apply if torch.is_grad_enabled() else _rotate_inplace
        query, key = (rotate(part.contiguous(), cosine, sine) for part in (query, key))
        query, key, value = (part.view(shape).transpose(1, 2) for part in (query, key, value))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            **({} if self.sliding_window is None else {"sliding_window": self.sliding_window}),
            **options,
        )
        return self.o_proj(out.reshape(*shape[:-2], -1)), weights


def linears_of(layer: Any) -> list[Any]:
    """Of a decoder layer: to queries, keys, values, of what attention gives, gate, up and down."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def norms_of(layer: Any) -> list[Any]:
    """Of a decoder layer: of its input, heads of queries and of keys (or None), the MLP's input."""
    heads = (layer.self_attn.q_norm, layer.self_attn.k_norm)
    return [layer.input_layernorm, *heads, layer.post_attention_layernorm]


def sizes_of(layer: Any) -> DecoderSizes | None:
    """Of a decoder layer with `LeanAttention`; None if its norms differ in their epsilon."""
    attention = layer.self_attn
    epsilons = {norm.variance_epsilon for norm in norms_of(layer) if norm is not None}
    size = attention.head_dim
    heads, kv_heads = (len(p.weight) // size for p in (attention.q_proj, attention.k_proj))
    inner, width = layer.mlp.gate_proj.weight.shape
    if len(epsilons) > 1:
        return None
    return DecoderSizes(width, inner, heads, kv_heads, size, epsilons.pop(), attention.scaling)


def _linears(hidden: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """What several linear layers make of their common input: at once where they can."""
    if torch.is_grad_enabled():
        if all(type(layer) is LeanLinear for layer in layers):
            parameters = (p for layer in layers for p in (layer.weight, layer.bias))
            out: tuple[Tensor, ...] = _Linears.apply(hidden, *parameters)
            return out
    elif all(getattr(layer, "factor", None) is not None for layer in layers):
        pairs = ((layer.factor, layer.bias) for layer in layers)
        return kernels.linears(hidden, *pairs)  # type: ignore[arg-type]  # of linear layers
    return [layer(hidden) for layer in layers]


def _replace(model: nn.Module, find: Callable[[nn.Module], nn.Module | None]) -> int:
    found = [
        (parent, name, lean)
        for parent in model.modules()
        for name, child in parent.named_children()
        if (lean := find(child)) is not None
    ]
    for parent, name, lean in found:
        setattr(parent, name, lean)
    return len(found)


def _lean_linear(module: nn.Module) -> nn.Module | None:
    return LeanLinear(module).train(module.training) if type(module) is nn.Linear else None


def _lean(module: nn.Module) -> nn.Module | None:
    """A lean module that computes what ``module`` does; None if there is none."""
    lean: nn.Module
    if isinstance(module, (LeanRMSNorm, LeanGatedMLP, LeanAttention)):
        return None
    if type(module).__name__ in _ATTENTIONS:
        lean = LeanAttention(module).train(module.training)
        return lean if _attends_same(module, lean) else None
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        weight = module.weight
        if not isinstance(weight, nn.Parameter):
            return None
        width = len(weight)
        lean = LeanRMSNorm(weight, float(module.variance_epsilon))  # type: ignore[arg-type]  # a number
    elif type(module).__name__.endswith("MLP"):
        parts = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
        if not all(type(part) is LeanLinear and part.bias is None for part in parts):
            return None
        lean = LeanGatedMLP(*parts)  # type: ignore[arg-type]  # as just seen
        width = parts[0].in_features  # type: ignore[union-attr]
    else:
        return None
    return lean.train(module.training) if _is_same(module, lean, width) else None


@torch.no_grad()
def _attends_same(module: nn.Module, lean: LeanAttention) -> bool:
    """Whether both give the same on a probe, and ask the same of the attention function."""
    config, own = lean.config, lean.config._attn_implementation
    probe = _probe(module, config.hidden_size)
    angle = torch.arange(_PROBE_ROWS)[:, None] / torch.arange(1, lean.head_dim // 2 + 1).repeat(2)
    places = tuple(part(angle)[None].to(probe) for part in (torch.cos, torch.sin))
    asked: list[list[Tensor]] = []
    options: list[dict[str, object]] = []

    def attend(_: nn.Module, *tensors: Any, **given: object) -> tuple[Tensor, None]:
        asked.append(list(tensors[:3]))
        options.append({name: value for name, value in given.items() if value is not None})
        return tensors[0].transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("trinity_probe", attend)
    config._attn_implementation = "trinity_probe"
    try:
        outputs = [m(probe, places, attention_mask=None)[0] for m in (lean, module)]
    finally:
        config._attn_implementation = own
    pairs = zip(*asked, strict=True)
    return options[0] == options[1] and all(_is_close(*p) for p in (outputs, *pairs))


@torch.no_grad()
def _is_same(module: nn.Module, lean: nn.Module, width: int) -> bool:
    probe = _probe(module, width)
    return _is_close(lean(probe), module(probe))


def _probe(module: nn.Module, width: int) -> Tensor:
    parameter = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(1, _PROBE_ROWS, width, generator=generator)
    return probe.to(parameter.device, parameter.dtype)


def _is_close(found: Tensor, wanted: Tensor) -> bool:
    found, wanted, dtype = found.double(), wanted.double(), wanted.dtype
    gap = torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted)
    return bool(gap < _TOLERANCES.get(dtype, 0))


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.save_for_backward(hidden, *weights)
        return tuple(kernels.linears(hidden, *zip(weights, biases, strict=True)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *weights = ctx.saved_tensors
        wants_hidden, *wants = ctx.needs_input_grad
        rows = [_rows(grad) for grad in grads]
        found: list[Tensor | None] = [None]
        if wants_hidden:
            pairs = zip(rows, weights, strict=True)
            found = [kernels.sum_of_products(*pairs).view_as(hidden)]
        for grad, weight, wants_weight, wants_bias in zip(
            rows, weights, wants[::2], wants[1::2], strict=True
        ):
            found.append(product_gradient(weight, grad, _rows(hidden)) if wants_weight else None)
            found.append(grad.sum(dim=0) if wants_bias else None)
        return tuple(found)


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


class _Rotated(torch.autograd.Function):
    """Leaves its input as it is: autograd forbids to change one that is a view of another."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate_inplace(rows.clone(), cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        cosine, sine = ctx.saved_tensors
        return _rotate_inplace(grad, cosine, sine, is_gradient=True), None, None


def _rotate_inplace(
    rows: Tensor, cosine_MW: Tensor, sine_MW: Tensor, is_gradient: bool = False
) -> Tensor:
    """Rows of heads, contiguous and of any shape."""
    heads_MHW = rows.view(len(cosine_MW), -1, cosine_MW.shape[-1])
    kernels.rotate_inplace(heads_MHW, cosine_MW, sine_MW, is_gradient)
    return rows


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor
    ) -> Tensor:
        hidden_MD = _rows(hidden)
        gate_MF, up_MF = kernels.linears(hidden_MD, (gate_FD, None), (up_FD, None))
        ctx.save_for_backward(hidden_MD, gate_MF, up_MF, gate_FD, up_FD, down_DF)
        out_MD = kernels.linear(kernels.silu_mul(gate_MF, up_MF), down_DF)
        return out_MD.view(*hidden.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MD, gate_MF, up_MF, gate_FD, up_FD, down_DF = ctx.saved_tensors
        grad_MD = _rows(grad)
        _, *wants = ctx.needs_input_grad
        inner_MF = kernels.sum_of_products((grad_MD, down_DF))
        active_MF, gate_grad_MF = kernels.silu_mul_backward_inplace(inner_MF, gate_MF, up_MF)
        grad_hidden = kernels.sum_of_products((gate_grad_MF, gate_FD), (inner_MF, up_FD))
        grad_down = product_gradient(down_DF, grad_MD, active_MF) if wants[2] else None
        grad_gate = product_gradient(gate_FD, gate_grad_MF, hidden_MD) if wants[0] else None
        grad_up = product_gradient(up_FD, inner_MF, hidden_MD) if wants[1] else None
        return grad_hidden.view(*grad.shape[:-1], -1), grad_gate, grad_up, grad_down


def _rows(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1]).contiguous()
