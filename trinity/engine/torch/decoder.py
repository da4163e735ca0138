"""A model's forward pass with all its layers in one compiled kernel, for models that it knows."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trinity.common.models.kernels.attention import fits
from trinity.common.models.kernels.decoder import Decoder, LayerWeights
from trinity.common.models.lean import (
    LeanAttention,
    LeanGatedMLP,
    LeanRMSNorm,
    linears_of,
    norms_of,
    sizes_of,
)
from trinity.engine.torch.attention import StepAttention
from trinity.engine.torch.packed_linear import PackedLinear

_MODELS = {f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}


class CompiledModel:
    """Logits of an engine step. Whoever uses it sees first that they are the model's own."""

    def __init__(self, model: PreTrainedModel, decoder: Decoder) -> None:
        self._embed: Any = model.get_input_embeddings()
        self._base: Any = model.base_model
        self._head: Any = model.get_output_embeddings()
        self._decoder = decoder

    def __call__(
        self, step: StepAttention, token_M: Tensor, position_1M: Tensor, keep: Tensor
    ) -> Tensor:
        """Logits [kept tokens, V]."""
        hidden_MD = self._embed(token_M)
        turns = self._base.rotary_emb(hidden_MD[None], position_ids=position_1M)
        cosine_MW, sine_MW = (part[0].contiguous() for part in turns)
        sizes = self._decoder.sizes
        like = hidden_MD.new_empty(0, sizes.kv_heads, sizes.head_size)
        self._decoder.run_inplace(hidden_MD, cosine_MW, sine_MW, *step.parts(like))
        logits: Tensor = self._head(self._base.norm(hidden_MD[keep]))
        return logits


def compiled_model(model: PreTrainedModel) -> CompiledModel | None:
    """None where some layer is not of the kind that the kernel knows."""
    if type(model).__name__ not in _MODELS:
        return None
    base: Any = model.base_model
    layers = list(base.layers)
    weights = [found for layer in layers if (found := _weights(layer)) is not None]
    if not weights or len(weights) < len(layers):
        return None
    sizes, *others = {sizes_of(layer) for layer in layers}
    if sizes is None or others:
        return None
    head = torch.empty(1, 1, sizes.head_size, dtype=torch.bfloat16)
    return CompiledModel(model, Decoder(weights, sizes)) if fits(head, head, head) else None


def _weights(layer: Any) -> LayerWeights | None:
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(attention, LeanAttention) or not isinstance(mlp, LeanGatedMLP):
        return None
    linears = linears_of(layer)
    products = [
        (linear.factor.panels, linear.bias)
        for linear in linears
        if isinstance(linear, PackedLinear) and linear.factor is not None
    ]
    norms = norms_of(layer)
    is_known = all(norm is None or isinstance(norm, LeanRMSNorm) for norm in norms)
    if len(products) < len(linears) or not is_known:
        return None
    weights = [norm if norm is None else norm.weight for norm in norms]
    return LayerWeights(products, weights, attention.sliding_window)
