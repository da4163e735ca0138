"""Pieces of prompts that a step of the engine computes, and what attention is told of them."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trinity.common.models.kernels.attention import AttentionTasks
from trinity.engine.torch.attention import PromptTiles
from trinity.engine.torch.jobs import Job, SampleRows, ScoreJob
from trinity.engine.torch.kv import TILE, round_up
from trinity.engine.torch.prompt_pages import PromptSlot

_TASK_QUERIES = 128  # tokens of a prompt that one thread attends for at a time


@dataclass
class Piece:
    """A stretch of one job's tokens that this step computes."""

    job: Job
    start: int
    end: int

    @property
    def completes(self) -> bool:
        return self.end == len(self.job.tokens)

    @property
    def slot(self) -> PromptSlot:
        assert self.job.slot is not None, "a job is computed that has no place"
        return self.job.slot


@dataclass
class _TilePart:
    """What a piece has in one tile: pages up to it, first token in the step, positions."""

    pages: np.ndarray
    first: int
    start: int
    end: int


def wanted_places(piece: Piece) -> np.ndarray:
    """Which tokens of a piece need logits: the last of a prompt, all but the last of a score."""
    count = piece.end - piece.start
    if isinstance(piece.job, ScoreJob):
        return np.arange(count - 1 if piece.completes else count)
    return np.array([count - 1]) if piece.completes else np.zeros(0, dtype=np.int64)


def sample_tasks(rows: SampleRows) -> AttentionTasks:
    """Each sample's last token over its prompt and its own tokens.

    Samples of one job come one after the other and read their prompt in the row of the first.
    """
    _, first, job = np.unique(rows["job"], return_index=True, return_inverse=True)
    order = np.argsort(job, kind="stable")
    prompt, count = rows["prompt_length"][order], rows["count"][order]
    spans = (
        np.stack([first[job][order], order], axis=1),
        np.stack([prompt, count], axis=1),
        np.stack([np.zeros_like(prompt), prompt], axis=1),
    )
    span_row, span_length, span_skip = (torch.from_numpy(x.flatten()) for x in spans)
    row = torch.from_numpy(order)
    return AttentionTasks(
        first_query=row,
        num_queries=torch.ones_like(row),
        first_place=torch.from_numpy(prompt + count - 1),
        spans_end=2 * torch.arange(1, len(row) + 1),
        span_first=span_row,
        span_length=span_length,
        span_skip=span_skip,
    )


def prompt_tasks(pieces: list[Piece]) -> AttentionTasks:
    """The tokens of each piece, some at a time, over the pages of its prompt."""
    first = 0
    queries: list[tuple[int, int, int]] = []
    pages: list[np.ndarray] = []
    for piece in pieces:
        for start in range(piece.start, piece.end, _TASK_QUERIES):
            end = min(start + _TASK_QUERIES, piece.end)
            queries.append((first, end - start, start))
            pages.append(piece.slot.pages[: -(-end // TILE)])
            first += end - start
    row, count, place = torch.tensor(queries, dtype=torch.int64).view(-1, 3).t().contiguous()
    page = torch.from_numpy(concatenated(pages))
    ends = torch.tensor([len(own) for own in pages], dtype=torch.int64).cumsum(0)
    return AttentionTasks(row, count, place, ends, page, torch.full_like(page, TILE))


def prompt_tiles(pieces: list[Piece], device: torch.device) -> list[PromptTiles]:
    """The pieces cut into tiles, those of equal place together."""
    by_tile: dict[int, list[_TilePart]] = {}
    offset = 0
    for piece in pieces:
        for tile in range(piece.start // TILE, -(-piece.end // TILE)):
            start, end = max(piece.start, tile * TILE), min(piece.end, (tile + 1) * TILE)
            first = offset + start - piece.start
            by_tile.setdefault(tile, []).append(
                _TilePart(piece.slot.pages[: tile + 1], first, start, end)
            )
        offset += piece.end - piece.start
    return [_tiles_at(tile, parts, device) for tile, parts in by_tile.items()]


def _tiles_at(tile: int, parts: list[_TilePart], device: torch.device) -> PromptTiles:
    end = max(part.end for part in parts)
    width = round_up(end - tile * TILE, 4)
    gather = np.zeros((len(parts), width), dtype=np.int64)
    places, tokens = [], []
    for number, part in enumerate(parts):
        inside = np.arange(part.start - tile * TILE, part.end - tile * TILE)
        indexes = np.arange(part.first, part.first + part.end - part.start)
        gather[number, inside] = indexes
        places.append(number * width + inside)
        tokens.append(indexes)
    return PromptTiles(
        tile=tile,
        num_keys=end,
        pages=index_tensor(np.stack([part.pages for part in parts]), device),
        gather=index_tensor(gather, device),
        scatter_from=index_tensor(np.concatenate(places), device),
        scatter_to=index_tensor(np.concatenate(tokens), device),
    )


def concatenated(parts: list[np.ndarray]) -> np.ndarray:
    """``parts`` one after the other; there may be none."""
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def index_tensor(values: np.ndarray, device: torch.device) -> Tensor:
    """Whole numbers as a tensor to pick rows by."""
    return torch.from_numpy(values.astype(np.int64)).to(device)
