"""Decoder layers on the CPU as one step of autograd each: a compiled kernel's two calls.

The modules of `trinity.common.models.lean` compute the same one by one, with the same bits. Here
nothing is kept that a norm gives, and gradients of weights add to the masters' on the way.

Shape letters: N = packed tokens, D = hidden size.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from trinity.common.models.gradients import gradient_of_master
from trinity.common.models.kernels.attention import AttentionTasks, fits
from trinity.common.models.kernels.layer import Trained, TrainedLayer
from trinity.common.models.kernels.products import are_fit
from trinity.common.models.lean import (
    LeanAttention,
    LeanGatedMLP,
    LeanLinear,
    LeanRMSNorm,
    linears_of,
    norms_of,
    sizes_of,
)
from trinity.trainer.backends.torch.attention import IMPLEMENTATION
from trinity.trainer.backends.torch.attention_plan import AttentionPlan

_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}


def join_layers_inplace(model: PreTrainedModel) -> int:
    """Have the decoder layers of a lean model computed in one step where they can be; how many.

    They can where weights are in bfloat16 with masters of their own: else they are computed module
    by module, as before.
    """
    joined = [layer for layer in model.modules() if _is_known(layer)]
    for layer in joined:
        layer.__class__ = _joined(type(layer))  # type: ignore[arg-type]  # classes have hashes
    return len(joined)


def _is_known(layer: nn.Module) -> bool:
    """Whether it is one of transformers' layers, all of whose parts are lean, without dropout."""
    kind = type(layer)
    if kind.__name__ not in _LAYERS or not kind.__module__.startswith("transformers.models."):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if type(attention) is not LeanAttention or type(mlp) is not LeanGatedMLP:
        return False
    norms = [norm for norm in norms_of(layer) if norm is not None]
    return (
        all(type(linear) is LeanLinear for linear in linears_of(layer))
        and all(type(norm) is LeanRMSNorm for norm in norms)
        and sizes_of(layer) is not None
        and attention.attention_dropout == 0
    )


@cache
def _joined(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of the same name: by its layers' names a model is cut over ranks."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        **options: Any,  # what the model was called with
    ) -> Tensor:
        plan = options.get("attention_plan")
        compiled = _compiled(self, hidden_states) if plan is not None else None
        if compiled is None:
            options["position_embeddings"] = position_embeddings
            found: Tensor = kind.forward(self, hidden_states, **options)
            return found
        assert isinstance(plan, AttentionPlan)
        turns = (part.squeeze(0).contiguous() for part in position_embeddings)
        out: Tensor = _Layer.apply(hidden_states.squeeze(0), *turns, plan.tasks, compiled)
        return out.unsqueeze(0)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _compiled(layer: Any, hidden: Tensor) -> TrainedLayer | None:
    """The layer as the kernel takes it; None where it does not."""
    attention = layer.self_attn
    linears, norms = linears_of(layer), norms_of(layer)
    head = hidden.new_empty(0, 1, attention.head_dim)
    weights = [linear.weight for linear in linears]
    is_ours = attention.config._attn_implementation == IMPLEMENTATION
    reaches_weights = hidden.requires_grad or not torch.is_grad_enabled()  # by autograd
    if not is_ours or not reaches_weights:
        return None
    if not are_fit(hidden.view(-1, hidden.shape[-1]), *weights) or not all(
        p.dtype is torch.bfloat16 and p.is_contiguous() for p in layer.parameters()
    ):
        return None
    pairs = [(_trained(linear.weight), _trained(linear.bias)) for linear in linears]
    trained_norms = [_trained(None if norm is None else norm.weight) for norm in norms]
    places = [*(part for pair in pairs for part in pair), *trained_norms]
    if any(place is None for place in places) or not fits(head, head, head):
        return None
    sizes, window = sizes_of(layer), attention.sliding_window
    return TrainedLayer(pairs, trained_norms, sizes, window)  # type: ignore[arg-type]  # no None


def _trained(weight: Tensor | None) -> Trained | None:
    """None if its gradient would have to go another way than to a master."""
    if weight is None or not weight.requires_grad or not torch.is_grad_enabled():
        return Trained(weight)
    gradient = gradient_of_master(weight)
    return None if gradient is None else Trained(weight, gradient)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # autograd's context
        hidden_ND: Tensor,
        cosine: Tensor,
        sine: Tensor,
        tasks: AttentionTasks,
        layer: TrainedLayer,
    ) -> Tensor:
        out_ND, kept, scales = layer.forward(hidden_ND, cosine, sine, tasks)
        ctx.save_for_backward(hidden_ND, cosine, sine, kept, scales)
        ctx.tasks, ctx.layer = tasks, layer
        return out_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, cosine, sine, *kept = ctx.saved_tensors
        given = (grad_ND.contiguous(), hidden_ND, cosine, sine, ctx.tasks, *kept)
        return ctx.layer.backward(*given), None, None, None, None
