"""Attention over a packed row: every segment sees its ancestors and its own past.

Registered with transformers under `IMPLEMENTATION`; a model's forward gets the `AttentionPlan` of
its packed row as the keyword ``attention_plan``. On the CPU the forward pass is the engine's own
attention, product for product, so that a trained token's hidden state has the bits it was sampled
with; the backward pass computes the probabilities again, in float32. On a GPU it is that of
`trinity.trainer.backends.torch.varlen`; models that its kernels don't take use the blocks here.

Shape letters: N = packed tokens, S = pieces of a block, Q = queries of a piece (padded), L = keys
(padded), H = query heads, G = key-value heads, R = H / G, M = R * Q, D = head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
from trinity.engine.torch.attention import AttentionOptions, tiled_attention
from trinity.engine.torch.kv import GRAIN, round_up
from trinity.trainer.backends.torch.packing import PackedRows, Segment
from trinity.trainer.backends.torch.varlen import (
    VarlenPlan,
    fits_varlen,
    plan_varlen,
    varlen_attention,
)

IMPLEMENTATION = "trinity_packed"

_PIECE = 128  # queries computed together: a piece sees no keys behind its last query
_MULTIPLE = 4  # matrix libraries treat a rest of 1 to 3 rows differently, to the last bit
_MAX_SCORES = 1 << 23  # scores of the backward pass at a time: 32 MB in float32
_MAX_CACHED_BIAS = 1 << 24


@dataclass(frozen=True)
class Piece:
    """Consecutive queries of a segment: places ``first`` to ``last`` (excluded) of its sequence."""

    segment: Segment
    first: int
    last: int

    @property
    def num_keys(self) -> int:
        return round_up(self.last, GRAIN)


@dataclass
class AttentionBlock:
    """Pieces that see about as many keys, computed together.

    Args:
        query: [S, Q] packed index of each query; padding repeats the last.
        is_query: [S, Q] False on padding.
        first: [S] place of the first query in its sequence.
        key: [S, L] packed index of each key, in order of the sequence; padding repeats the last.
        num_keys: [S] keys that are real.
    """

    query: Tensor
    is_query: Tensor
    first: Tensor
    key: Tensor
    num_keys: Tensor
    _bias: dict[object, Tensor] = field(default_factory=dict)

    def bias(self, num_repeats: int, window: int | None, like: Tensor) -> Tensor:
        """[S, 1, M, L]: 0 where a query sees a key, -inf elsewhere; as ``like`` is."""
        dtype, device = like.dtype, like.device
        cached = self._bias.get((num_repeats, window, dtype))
        if cached is not None:
            return cached
        place = self.first.to(device)[:, None] + torch.arange(self.query.shape[1], device=device)
        distance = place[:, :, None] - torch.arange(self.key.shape[1], device=device)
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        bias = bias.masked_fill_(~seen, float("-inf")).repeat(1, num_repeats, 1)[:, None]
        if bias.numel() <= _MAX_CACHED_BIAS:
            self._bias[num_repeats, window, dtype] = bias
        return bias


@dataclass(frozen=True)
class HeadMaps:
    """Where the rows (one head of one token) of a block's operands are among all rows.

    Args:
        query: [S * G * M] for each block; row ``n * H + h``.
        grad: The same, with ``N * H`` for padding: a row of zeros.
        key: [S * G * L] for each block; row ``n * G + g``.
        place: [N * H] where each query's output is in the blocks' outputs, one after the other.
        slots: For each key row in turn, its places in the blocks' keys ...
        offsets: ... and [N * G] where its part of ``slots`` begins.
    """

    query: list[Tensor]
    grad: list[Tensor]
    key: list[Tensor]
    place: Tensor
    slots: Tensor
    offsets: Tensor

    def to(self, device: torch.device) -> "HeadMaps":
        """The same on a device."""
        query, grad, key = ([t.to(device) for t in ts] for ts in (self.query, self.grad, self.key))
        place, slots, offsets = (t.to(device) for t in (self.place, self.slots, self.offsets))
        return HeadMaps(query, grad, key, place, slots, offsets)


class AttentionPlan:
    """How to compute attention of one packed row.

    Blocks, with index maps by number of heads; ``varlen`` is the same for a GPU's kernels.
    """

    def __init__(self, packed: PackedRows, device: torch.device) -> None:
        self._packed = packed
        self._device = device
        self._blocks: list[AttentionBlock] | None = None
        self._maps: dict[tuple[int, int], HeadMaps] = {}
        self._tasks: AttentionTasks | None = None
        self.varlen: VarlenPlan | None = None
        if device.type == "cuda":
            self.varlen = plan_varlen(packed.segments, device)

    @property
    def tasks(self) -> AttentionTasks:
        """The same for the CPU's kernels: each piece over the segments of its path."""
        if self._tasks is None:
            self._tasks = _tasks(self._packed.segments)
        return self._tasks

    @property
    def blocks(self) -> list[AttentionBlock]:
        """Pieces of the segments, those of the same shape together."""
        if self._blocks is None:
            pieces = [piece for segment in self._packed.segments for piece in _cut(segment)]
            self._blocks = [_block(members) for members in _by_shape(pieces)]
        return self._blocks

    def maps(self, num_heads: int, kv_heads: int) -> HeadMaps:
        """Index maps for that many heads; computed once, all layers share them."""
        key = (num_heads, kv_heads)
        if key not in self._maps:
            num_tokens = len(self._packed.token_ids)
            maps = _head_maps(self.blocks, num_tokens, num_heads, kv_heads)
            self._maps[key] = maps.to(self._device)
        return self._maps[key]


def plan_attention(
    packed: PackedRows,
    device: torch.device = torch.device("cpu"),  # noqa: B008  # a constant
) -> AttentionPlan:
    """How to compute attention of ``packed`` on ``device``."""
    return AttentionPlan(packed, device)


def _tasks(segments: Sequence[Segment]) -> AttentionTasks:
    trees: dict[int, list[Piece]] = {}
    for segment in segments:
        trees.setdefault(segment.path()[0].offset, []).extend(_cut(segment))
    pieces = [piece for tree in trees.values() for piece in tree]
    paths = [piece.segment.path() for piece in pieces]
    spans = [span for path in paths for span in path]
    places = [p.segment.offset + p.first - p.segment.first for p in pieces]
    return AttentionTasks(
        first_query=torch.tensor(places),
        num_queries=torch.tensor([p.last - p.first for p in pieces]),
        first_place=torch.tensor([p.first for p in pieces]),
        spans_end=torch.tensor([len(path) for path in paths]).cumsum(0),
        span_first=torch.tensor([span.offset for span in spans]),
        span_length=torch.tensor([len(span.tokens) for span in spans]),
        trees_end=torch.tensor([len(tree) for tree in trees.values()]).cumsum(0),
    )


def _cut(segment: Segment) -> Iterator[Piece]:
    end = segment.first + len(segment.tokens)
    for first in range(segment.first, end, _PIECE):
        yield Piece(segment, first, min(first + _PIECE, end))


def _by_shape(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces of about the same number of keys, of which none is padded to over twice its size."""
    ordered = sorted(pieces, key=lambda p: (p.num_keys, p.last - p.first, p.segment.offset))
    groups: list[list[Piece]] = []
    fewest = most = 0
    for piece in ordered:
        size = piece.last - piece.first
        fewest, most = min(fewest, size), max(most, size)
        most_keys = groups[-1][0].num_keys * 9 // 8 + GRAIN if groups else 0
        if most <= 2 * fewest + 8 and piece.num_keys <= most_keys:
            groups[-1].append(piece)
        else:
            groups.append([piece])
            fewest = most = size
    return groups


def _block(pieces: Sequence[Piece]) -> AttentionBlock:
    longest = max(p.last - p.first for p in pieces)
    num_queries = -(-longest // _MULTIPLE) * _MULTIPLE
    query = torch.zeros(len(pieces), num_queries, dtype=torch.long)
    key = torch.zeros(len(pieces), max(p.num_keys for p in pieces), dtype=torch.long)
    is_query = torch.zeros_like(query, dtype=torch.bool)
    for s, piece in enumerate(pieces):
        seen = torch.cat(
            [torch.arange(p.offset, p.offset + len(p.tokens)) for p in piece.segment.path()]
        )[: piece.last]
        own = seen[piece.first :]
        query[s, : len(own)], query[s, len(own) :] = own, own[-1]
        key[s, : len(seen)], key[s, len(seen) :] = seen, seen[-1]
        is_query[s, : len(own)] = True
    return AttentionBlock(
        query,
        is_query,
        torch.tensor([p.first for p in pieces]),
        key,
        torch.tensor([p.last for p in pieces]),
    )


def _head_maps(
    blocks: Sequence[AttentionBlock], num_tokens: int, num_heads: int, kv_heads: int
) -> HeadMaps:
    repeats = num_heads // kv_heads
    head = torch.arange(num_heads).view(1, kv_heads, repeats, 1)
    group = torch.arange(kv_heads).view(1, kv_heads, 1)
    queries, grads, keys, slots = [], [], [], []
    place = torch.empty(num_tokens * num_heads, dtype=torch.long)
    query_start = key_start = 0
    for block in blocks:
        query = block.query[:, None, None] * num_heads + head
        is_query = block.is_query[:, None, None].expand_as(query)
        key = block.key[:, None] * kv_heads + group
        is_key = torch.arange(block.key.shape[1]) < block.num_keys[:, None]
        is_key = is_key[:, None].expand_as(key)
        at = torch.arange(query_start, query_start + query.numel()).view_as(query)
        place[query[is_query]] = at[is_query]
        at = torch.arange(key_start, key_start + key.numel()).view_as(key)
        slots.append(torch.stack([key[is_key], at[is_key]]))
        queries.append(query.flatten())
        grads.append(query.masked_fill(~is_query, num_tokens * num_heads).flatten())
        keys.append(key.flatten())
        query_start += query.numel()
        key_start += key.numel()
    rows, places = torch.cat(slots, dim=1)
    order = rows.argsort(stable=True)
    offsets = torch.searchsorted(rows[order], torch.arange(num_tokens * kv_heads))
    return HeadMaps(queries, grads, keys, place, places[order], offsets)


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
        num_heads, kv_heads = query_NHD.shape[1], key_NGD.shape[1]
        maps = plan.maps(num_heads, kv_heads)
        rows = [t.reshape(-1, t.shape[-1]) for t in (query_NHD, key_NGD, value_NGD)]
        outputs = []
        for i, block in enumerate(plan.blocks):
            query_SGMD = _gather(rows[0], maps.query[i], len(block.query), kv_heads)
            key_SGLD, value_SGLD = (
                _gather(t, maps.key[i], len(block.key), kv_heads) for t in rows[1:]
            )
            bias = block.bias(num_heads // kv_heads, options.window, query_NHD)
            out = tiled_attention(query_SGMD, key_SGLD, value_SGLD, bias, options)
            outputs.append(out.reshape(-1, out.shape[-1]))
        out = torch.cat(outputs).index_select(0, maps.place)
        return out.view(*query_NHD.shape[:2], -1)

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
    num_heads, kv_heads = query_NHD.shape[1], key_NGD.shape[1]
    maps = plan.maps(num_heads, kv_heads)
    rows = [t.reshape(-1, t.shape[-1]) for t in (query_NHD, key_NGD, value_NGD)]
    outputs = []
    for i, block in enumerate(plan.blocks):
        query_SGMD = _gather(rows[0], maps.query[i], len(block.query), kv_heads)
        key_SGLD, value_SGLD = (_gather(t, maps.key[i], len(block.key), kv_heads) for t in rows[1:])
        bias = block.bias(num_heads // kv_heads, options.window, query_NHD)
        out = scaled_dot_product_attention(
            query_SGMD, key_SGLD, value_SGLD, attn_mask=bias, scale=options.scale
        )
        outputs.append(out.reshape(-1, out.shape[-1]))
    out = torch.cat(outputs).index_select(0, maps.place)
    return out.view(*query_NHD.shape[:2], -1)


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers; twice does no harm."""
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
