"""Rows of a micro-batch as one row of tokens, in which what rows begin with alike stands once.

Rows of one group (the samples of a task, the steps of a trajectory) form a prefix tree. Every node
is a `Segment`: tokens that lie side by side in the packed row and see their ancestors' tokens, then
their own up to themselves. All layers but attention work on the packed row as on any row.

Shape letters: N = packed tokens, M = trained tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trinity.common.constants import ROUTES
from trinity.trainer.batch import TrainBatch

#: A split must save this many tokens: each segment costs a row of attention of its own.
_MIN_SAVED_TOKENS = 16


@dataclass
class Segment:
    """Tokens ``first`` to ``first + len(tokens)`` of a sequence, below its ``parent``."""

    tokens: np.ndarray
    first: int
    parent: "Segment | None" = None
    offset: int = 0
    """Where it stands in the packed row."""
    row: int = 0
    """The first row of the batch that it is a part of."""
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        self.depth = 0 if self.parent is None else self.parent.depth + 1

    def path(self) -> list["Segment"]:
        """From the root to this segment."""
        found, segment = [self], self.parent
        while segment is not None:
            found.append(segment)
            segment = segment.parent
        return found[::-1]


@dataclass
class PackedRows:
    """A micro-batch as one row of tokens.

    Args:
        token_ids: [N].
        position_ids: [N] place of each token in its own sequence.
        segments: In the order in which they stand in the row.
        source: [M] for each trained token, the packed token whose output predicts it.
        trained: The trained tokens themselves.
        images: What image tokens stand for; None without images.
        routes: [N, layers, k] experts that the tokens went to; None: not known, or not asked for.
    """

    token_ids: Tensor
    position_ids: Tensor
    segments: list[Segment]
    source: Tensor
    trained: "TrainedTokens"
    images: "PackedImages | None" = None
    routes: Tensor | None = None


@dataclass
class PackedImages:
    """The images of a packed row.

    Args:
        pixels: [images, C, H, W] each that is seen, once.
        place: [K] packed tokens that stand for pieces of images.
        piece: [K] which piece each is, counted through ``pixels``.
        num_pieces: Pieces there must be in all.
    """

    pixels: Tensor
    place: Tensor
    piece: Tensor
    num_pieces: int


@dataclass
class TrainedTokens:
    """The tokens whose log-probabilities are wanted, row by row.

    Args:
        target: [M] their ids.
        row: [M] the row of the batch each belongs to.
        column: [M] its place in that row's response.
    """

    target: Tensor
    row: Tensor
    column: Tensor

    def part(self, tokens: slice, rows: Sequence[int]) -> "TrainedTokens":
        """Some of the tokens, which are all those of ``rows``; rows are counted anew."""
        number = torch.full((int(self.row.max()) + 1,), -1)
        number[torch.tensor(rows)] = torch.arange(len(rows))
        return TrainedTokens(self.target[tokens], number[self.row[tokens]], self.column[tokens])

    def scatter(self, values: Tensor, batch: TrainBatch) -> Tensor:
        """[B, T] the values of the tokens ([M]), and 0 elsewhere. Differentiable."""
        width = batch["action_mask"].shape[1]
        place = self.row * width + self.column
        flat = values.new_zeros(len(batch) * width).index_put((place,), values)
        return flat.view(len(batch), width)


def pack_rows(batch: TrainBatch, shares_prefixes: bool = True) -> PackedRows:
    """Pack the rows that have a trained token, each up to the last that predicts one."""
    tokens = [row.numpy() for row in batch.row_tokens()]
    mask_BT = batch["action_mask"].numpy()
    prompt_length_B = batch["prompt_length"].tolist()
    columns = [np.flatnonzero(mask) for mask in mask_BT]
    rows = [b for b in range(len(batch)) if len(columns[b])]
    kept = {b: tokens[b][: prompt_length_B[b] + columns[b][-1]] for b in rows}
    roots = _trees(batch, rows, kept) if shares_prefixes else {b: Segment(kept[b], 0) for b in rows}
    segments = _place(roots, rows)
    source = [_packed_index(roots[b], prompt_length_B[b] + columns[b] - 1) for b in rows]
    target = [tokens[b][prompt_length_B[b] + columns[b]] for b in rows]
    return PackedRows(
        token_ids=_long(np.concatenate([s.tokens for s in segments])),
        position_ids=_long(
            np.concatenate([np.arange(s.first, s.first + len(s.tokens)) for s in segments])
        ),
        segments=segments,
        source=_long(np.concatenate(source)),
        trained=TrainedTokens(
            target=_long(np.concatenate(target)),
            row=_long(np.repeat(rows, [len(columns[b]) for b in rows])),
            column=_long(np.concatenate([columns[b] for b in rows])),
        ),
    )


def pack_images(batch: TrainBatch, segments: Sequence[Segment], image_token: int) -> PackedImages:
    """The images of ``batch`` (its ``pixel_values``) for the image tokens of packed segments.

    Tokens that rows share show the same image, so the first row's stands for all.
    """
    pixels = batch["pixel_values"]
    tokens = [row.numpy() for row in batch.row_tokens()]
    prompt_length = batch["prompt_length"].tolist()
    rows = sorted({segment.row for segment in segments})
    number = {row: place for place, row in enumerate(rows)}
    places, pieces = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    per_row = 0
    for segment in segments:
        row = tokens[segment.row]
        is_image = row == image_token
        is_image[prompt_length[segment.row] :] = False
        per_row = int(is_image.sum())
        end = segment.first + len(segment.tokens)
        inside = np.flatnonzero(is_image[segment.first : end])
        before = int(is_image[: segment.first].sum())
        places.append(segment.offset + inside)
        pieces.append(number[segment.row] * per_row + before + np.arange(len(inside)))
    return PackedImages(
        pixels[rows].flatten(0, 1),
        _long(np.concatenate(places)),
        _long(np.concatenate(pieces)),
        len(rows) * per_row,
    )


def pack_routes(batch: TrainBatch, segments: Sequence[Segment]) -> Tensor:
    """[N, layers, k] routes of ``batch`` for packed segments; of shared tokens the first row's."""
    routes = batch[ROUTES]
    return torch.cat([routes[s.row, s.first : s.first + len(s.tokens)] for s in segments])


def _long(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _trees(
    batch: TrainBatch, rows: Sequence[int], kept: dict[int, np.ndarray]
) -> dict[int, Segment]:
    """The last segment of each row; rows of a group hang in one tree."""
    groups: dict[int, list[int]] = {}
    group_B = batch["group_id"].tolist()
    for row in rows:
        groups.setdefault(group_B[row], []).append(row)
    leaves: dict[int, Segment] = {}
    for members in groups.values():
        ordered = sorted(members, key=lambda row: (kept[row].astype(">u4").tobytes(), row))
        _grow(ordered, kept, leaves)
    return leaves


@dataclass
class _Branch:
    """Rows to hang below ``parent``.

    They are in lexicographic order, are alike in their first ``known`` tokens, and ``parent``'s
    path covers the first ``start`` of these.
    """

    rows: Sequence[int]
    start: int = 0
    known: int = 0
    parent: Segment | None = None


def _grow(rows: Sequence[int], kept: dict[int, np.ndarray], leaves: dict[int, Segment]) -> None:
    """Hang ``rows`` into one tree; a stack of its own, as trees may be deeper than Python's."""
    waiting = [_Branch(rows)]
    while waiting:
        waiting += _split(waiting.pop(), kept, leaves)


def _split(
    branch: _Branch, kept: dict[int, np.ndarray], leaves: dict[int, Segment]
) -> list[_Branch]:
    """Hang what the rows of a branch begin with alike; the branches that are left below."""
    rows, start, parent = branch.rows, branch.start, branch.parent
    first, last = kept[rows[0]], kept[rows[-1]]
    shared = branch.known + _common_length(first[branch.known :], last[branch.known :])
    is_split = len(rows) == 1 or (shared - start) * (len(rows) - 1) >= _MIN_SAVED_TOKENS
    if is_split and shared > start:
        parent = Segment(first[start:shared], start, parent)
        start = shared
    ended = [row for row in rows if len(kept[row]) == start]
    for row in ended:
        assert parent is not None
        leaves[row] = parent
    branches: dict[int, list[int]] = {}
    for row in rows[len(ended) :]:
        tokens = kept[row]
        branches.setdefault(int(tokens[shared]) if len(tokens) > shared else -1, []).append(row)
    if members := branches.pop(-1, None):
        leaf = Segment(kept[members[0]][start:], start, parent)
        leaves.update(dict.fromkeys(members, leaf))
    return [_Branch(members, start, shared, parent) for members in branches.values()]


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def _place(leaves: dict[int, Segment], rows: Sequence[int]) -> list[Segment]:
    """All segments in the order of their first row, ancestors first; sets their offsets."""
    seen: dict[int, Segment] = {}
    for row in rows:
        for segment in leaves[row].path():
            if id(segment) not in seen:
                seen[id(segment)] = segment
                segment.row = row
    segments = list(seen.values())
    offset = 0
    for segment in segments:
        segment.offset = offset
        offset += len(segment.tokens)
    return segments


def _packed_index(leaf: Segment, positions: np.ndarray) -> np.ndarray:
    """Where the tokens at ``positions`` of a row stand in the packed row."""
    path = leaf.path()
    firsts = np.array([segment.first for segment in path])
    shift = np.array([segment.offset - segment.first for segment in path])
    return positions + shift[np.searchsorted(firsts, positions, side="right") - 1]
