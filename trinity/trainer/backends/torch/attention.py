"""Attention over a packed row: every segment sees its ancestors and its own past.

Registered with transformers under `IMPLEMENTATION`; a model's forward gets the `AttentionPlan` of
its packed row as the keyword ``attention_plan``. On the CPU the forward pass is the engine's own
attention, product for product, so that a trained token's hidden state has the bits it was sampled
with; the backward pass computes the probabilities again, in float32. On a GPU it is that of
`trinity.trainer.backends.torch.varlen`; models that its kernels don't take use the blocks here.

Shape letters: N = packed tokens, S = pieces of a block, Q = queries of a piece (padded), L = keys
(padded), H = query heads, G = key-value heads, R = H / G, M = R * Q, D = head size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag, scaled_dot_product_attention
from transformers import AttentionInterface

from trinity.common.models.kernels.attention import (
    AttentionTasks,
    KeyLayout,
    attention,
    attention_backward,
    fits,
)
from trinity.engine.torch.tiled_attention import AttentionOptions, tiled_attention
from trinity.trainer.backends.torch.attention_plan import AttentionBlock, AttentionPlan
from trinity.trainer.backends.torch.varlen import (
    fits_varlen,
    varlen_attention,
)

IMPLEMENTATION = "trinity_packed"

_MAX_SCORES = 1 << 23  # scores of the backward pass at a time: 32 MB in float32


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    attention_plan: AttentionPlan,
    **unused: object,
) -> tuple[Tensor, None]:
    """Attention function of transformers: query [1, H, N, D], key and value [1, G, N, D]."""
    if s_aux is not None or dropout:
        raise ValueError(
            f"{type(module).__name__} has attention sinks or dropout ({dropout}), which training "
            "on packed rows does not compute: set attention_dropout to 0, or use another model."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scale, sliding_window, softcap)
    query_NHD, key_NGD, value_NGD = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    varlen = attention_plan.varlen
    if varlen is not None and softcap is None and fits_varlen(query):
        out = varlen_attention(query_NHD, key_NGD, value_NGD, varlen, scale, sliding_window)
        return out[None], None
    if softcap is None:
        rows = tuple(t.contiguous() for t in (query_NHD, key_NGD, value_NGD))
        if fits(*rows):
            found: Tensor = _NativeAttention.apply(*rows, attention_plan.tasks, options)
            return found[None], None
    is_own = query.device.type == "cpu" or softcap is not None
    attend = _PackedAttention.apply if is_own else _fused_attention
    out_NHD = attend(query_NHD, key_NGD, value_NGD, attention_plan, options)
    return out_NHD[None], None


class _NativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # autograd's context
        query_NHD: Tensor,
        key_NGD: Tensor,
        value_NGD: Tensor,
        tasks: AttentionTasks,
        options: AttentionOptions,
    ) -> Tensor:
        given = (query_NHD, key_NGD, value_NGD)
        layout = KeyLayout.of_tokens(key_NGD)
        out_NHD, log_norm_NH = attention(*given, tasks, layout, options.scale, options.window)
        ctx.save_for_backward(*given, log_norm_NH)
        ctx.tasks, ctx.options = tasks, options
        return out_NHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor | None, ...]:  # autograd's context
        options: AttentionOptions = ctx.options
        query, key, value, log_norm = ctx.saved_tensors
        given = (grad_NHD.contiguous(), query, key, value, log_norm, ctx.tasks)
        return *attention_backward(*given, options.scale, options.window), None, None


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # autograd's context
        query_NHD: Tensor,
        key_NGD: Tensor,
        value_NGD: Tensor,
        plan: AttentionPlan,
        options: AttentionOptions,
    ) -> Tensor:
        ctx.save_for_backward(query_NHD, key_NGD, value_NGD)
        ctx.plan, ctx.options = plan, options
        return _by_blocks(query_NHD, key_NGD, value_NGD, plan, options, tiled_attention)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor | None, ...]:  # autograd's context
        query_NHD, key_NGD, value_NGD = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        options: AttentionOptions = ctx.options
        num_heads, kv_heads = query_NHD.shape[1], key_NGD.shape[1]
        maps = plan.maps(num_heads, kv_heads)
        rows = [t.reshape(-1, t.shape[-1]) for t in (query_NHD, key_NGD, value_NGD)]
        grad = grad_NHD.reshape(-1, grad_NHD.shape[-1])
        grad = torch.cat([grad, grad.new_zeros(1, grad.shape[-1])])
        parts: list[list[Tensor]] = [[], [], []]
        for i, block in enumerate(plan.blocks):
            bias = block.bias(num_heads // kv_heads, options.window, query_NHD)
            for s in _slices(block, num_heads):
                indices = (maps.grad[i], maps.query[i], maps.key[i], maps.key[i])
                operands = [
                    _gather(t, index, len(block.query), kv_heads, s).flatten(0, 1).float()
                    for t, index in zip((grad, *rows), indices, strict=True)
                ]
                found_parts = _gradients(operands, bias[s], options)
                for part, found in zip(parts, found_parts, strict=True):
                    part.append(found.flatten(0, 1))
        grad_query = torch.cat(parts[0]).index_select(0, maps.place)
        grad_key, grad_value = (
            embedding_bag(maps.slots, torch.cat(part), maps.offsets, mode="sum")
            for part in parts[1:]
        )
        return (
            grad_query.to(query_NHD.dtype).view_as(query_NHD),
            grad_key.to(key_NGD.dtype).view_as(key_NGD),
            grad_value.to(value_NGD.dtype).view_as(value_NGD),
            None,
            None,
        )


def _gather(
    rows: Tensor, index: Tensor, num_pieces: int, num_groups: int, part: slice = slice(None)
) -> Tensor:
    """[S, G, *, D] the rows at ``index``, for the pieces of ``part``."""
    index_S = index.view(num_pieces, -1)[part]
    found = rows.index_select(0, index_S.flatten())
    return found.view(len(index_S), num_groups, -1, rows.shape[-1])


def _slices(block: AttentionBlock, num_heads: int) -> Iterator[slice]:
    """Pieces whose scores fit into memory together."""
    size = num_heads * block.query.shape[1] * block.key.shape[1]
    step = max(1, _MAX_SCORES // size)
    for start in range(0, len(block.query), step):
        yield slice(start, min(start + step, len(block.query)))


def _gradients(
    operands: Sequence[Tensor], bias: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients at query, key and value, from those at the output and these: all float32.

    Operands and results are [S * G, *, D]; the operands are changed.
    """
    grad, query, key, value = operands
    query = query.mul_(options.scale)
    scores = torch.bmm(query, key.transpose(1, 2))
    slope = None
    if options.softcap is not None:
        bend = torch.tanh_(scores.div_(options.softcap))
        slope = 1 - bend.square()
        scores = bend * options.softcap
    by_piece = scores.view(len(bias), -1, *scores.shape[1:])
    probs = torch.softmax(by_piece.add_(bias), dim=-1).view_as(scores)
    grad_value = torch.bmm(probs.transpose(1, 2), grad)
    weighted = torch.bmm(grad, value.transpose(1, 2)).mul_(probs)
    grad_scores = weighted.addcmul_(probs, weighted.sum(dim=-1, keepdim=True), value=-1)
    if slope is not None:
        grad_scores = grad_scores.mul_(slope)
    grad_query = torch.bmm(grad_scores, key).mul_(options.scale)
    grad_key = torch.bmm(grad_scores.transpose(1, 2), query)
    return grad_query, grad_key, grad_value


def _fused_attention(
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
) -> Tensor:
    """The same by PyTorch's fused kernels and their gradients, for GPUs."""
    return _by_blocks(query_NHD, key_NGD, value_NGD, plan, options, _fused_block)


def _fused_block(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, options: AttentionOptions
) -> Tensor:
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=options.scale)


def _by_blocks(
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, AttentionOptions], Tensor],
) -> Tensor:
    """[N, H, D] the output of ``attend``, which is called for each block of the plan."""
    num_heads, kv_heads = query_NHD.shape[1], key_NGD.shape[1]
    maps = plan.maps(num_heads, kv_heads)
    rows = [t.reshape(-1, t.shape[-1]) for t in (query_NHD, key_NGD, value_NGD)]
    outputs = []
    for i, block in enumerate(plan.blocks):
        query_SGMD = _gather(rows[0], maps.query[i], len(block.query), kv_heads)
        key_SGLD, value_SGLD = (_gather(t, maps.key[i], len(block.key), kv_heads) for t in rows[1:])
        bias = block.bias(num_heads // kv_heads, options.window, query_NHD)
        out = attend(query_SGMD, key_SGLD, value_SGLD, bias, options)
        outputs.append(out.reshape(-1, out.shape[-1]))
    out = torch.cat(outputs).index_select(0, maps.place)
    return out.view(*query_NHD.shape[:2], -1)


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers; twice does no harm."""
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
