"""How attention of a packed row is computed: its pieces, blocks of them, and index maps.

Shape letters as in `trinity.trainer.backends.torch.attention`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trinity.common.models.kernels.attention import AttentionTasks
from trinity.engine.torch.kv import GRAIN, round_up
from trinity.trainer.backends.torch.packing import PackedRows, Segment
from trinity.trainer.backends.torch.varlen import VarlenPlan, plan_varlen

_PIECE = 128  # queries computed together: a piece sees no keys behind its last query
_MULTIPLE = 4  # matrix libraries treat a rest of 1 to 3 rows differently, to the last bit
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
