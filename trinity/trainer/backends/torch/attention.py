"""Attention over a packed row: every segment sees its ancestors and its own past.

Registered with transformers under `IMPLEMENTATION`; a model's forward gets the `AttentionPlan` of
its packed row as the keyword ``attention_plan``.

Shape letters: N = packed tokens, S = segments of a block, Q = queries (padded), K = keys (padded),
H = query heads, G = key-value heads, R = query heads a key-value head, D = head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trinity.trainer.backends.torch.packing import PackedRows, Segment

IMPLEMENTATION = "trinity_packed"


@dataclass(frozen=True)
class AttentionBlock:
    """Segments of about the same shape, computed together.

    Args:
        query: [S, Q] packed index of each query; padding repeats some token.
        key: [S, K] packed index of each key: ancestors, then own tokens.
        mask: [S, 1, Q, K] True where a query sees a key; None where the plain causal mask holds.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """How to compute attention of one packed row.

    Args:
        blocks: Each segment is in one of them.
        place: [N] where each packed token's output is in the blocks' outputs, one after the other.
    """

    blocks: list[AttentionBlock]
    place: Tensor


def plan_attention(packed: PackedRows) -> AttentionPlan:
    """Index maps for the segments of a packed row, grouped by shape."""
    blocks, offset = [], 0
    place = torch.empty(len(packed.token_ids), dtype=torch.long)
    for segments in _by_shape(packed.segments):
        block = _block(segments)
        blocks.append(block)
        width = block.query.shape[1]
        for s, segment in enumerate(segments):
            start = offset + s * width
            own = slice(segment.offset, segment.offset + len(segment.tokens))
            place[own] = torch.arange(start, start + len(segment.tokens))
        offset += len(segments) * width
    return AttentionPlan(blocks, place)


def _by_shape(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments without and with ancestors apart; neighbours in length together."""
    groups: list[list[Segment]] = []
    for is_root in (True, False):
        members = [s for s in segments if (s.parent is None) == is_root]
        members.sort(key=lambda s: (len(s.tokens), s.first))
        current: list[Segment] = []
        for segment in members:
            if current and _is_wasteful([*current, segment]):
                groups.append(current)
                current = []
            current.append(segment)
        if current:
            groups.append(current)
    return groups


def _is_wasteful(segments: Sequence[Segment]) -> bool:
    """Whether padding these to one shape more than doubles the work."""
    pairs = [len(s.tokens) * (s.first + len(s.tokens)) for s in segments]
    padded = max(len(s.tokens) for s in segments) * max(s.first + len(s.tokens) for s in segments)
    return padded * len(segments) > 2 * sum(pairs) + 64 * 64


def _block(segments: Sequence[Segment]) -> AttentionBlock:
    num_queries = max(len(s.tokens) for s in segments)
    num_keys = max(s.first + len(s.tokens) for s in segments)
    query = torch.zeros(len(segments), num_queries, dtype=torch.long)
    key = torch.zeros(len(segments), num_keys, dtype=torch.long)
    for s, segment in enumerate(segments):
        path = [torch.arange(p.offset, p.offset + len(p.tokens)) for p in segment.path()]
        own, seen = path[-1], torch.cat(path)
        query[s, : len(own)], query[s, len(own) :] = own, own[-1]
        key[s, : len(seen)], key[s, len(seen) :] = seen, own[-1]
    if all(s.first == 0 for s in segments):
        return AttentionBlock(query, key, None)
    first = torch.tensor([s.first for s in segments])
    place = torch.arange(num_queries)
    mask = torch.arange(num_keys) <= (first[:, None] + place)[:, :, None]
    return AttentionBlock(query, key, mask[:, None])


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    attention_plan: AttentionPlan,
    **unused: object,
) -> tuple[Tensor, None]:
    """Attention function of transformers: query [1, H, N, D], key and value [1, G, N, D]."""
    query_NHD, key_NGD, value_NGD = (t[0].transpose(0, 1) for t in (query, key, value))
    outputs = []
    for block in attention_plan.blocks:
        q = query_NHD[block.query].transpose(1, 2)
        k, v = (t[block.key].transpose(1, 2) for t in (key_NGD, value_NGD))
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=block.mask,
            dropout_p=dropout,
            is_causal=block.mask is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[attention_plan.place][None], None


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers; twice does no harm."""
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
