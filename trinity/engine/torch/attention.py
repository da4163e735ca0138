"""Attention of one engine step: the function transformers' models call, and its tiles.

Every product has a shape that depends on the sequence alone (whole tiles of positions; see
`tiled_attention` for the rest): that makes its bits the same whatever the batch.

Shape suffixes: N = tokens, S = running samples, B = rows of a product, H = query heads,
K = key/value heads, M = queries of a row, L = key positions, D = head size.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from trinity.common.models.kernels.attention import (
    AttentionTasks,
    KeyLayout,
    attention,
    fits,
)
from trinity.common.models.kernels.decoder import DecoderPart
from trinity.engine.torch.kv import GRAIN, TILE, KVRows, round_up
from trinity.engine.torch.prompt_pages import PromptPages
from trinity.engine.torch.tiled_attention import AttentionOptions, tiled_attention

IMPLEMENTATION = "trinity_engine"

_active = threading.local()


@dataclass
class PromptTiles:
    """Prompt pieces of one step that lie in the same tile of their prompts.

    Args:
        tile: Which tile: positions ``tile * TILE`` up to ``(tile + 1) * TILE``.
        num_keys: Positions up to the last one that is computed in this tile.
        pages: [B, tile + 1] pages of each prompt up to this tile.
        gather: [B, M] index of each position's token among the step's prompt tokens, for the
            first M positions of the tile; 0 where the step has none.
        scatter_from: Places in the flattened [B * M] output that are real ...
        scatter_to: ... and the prompt tokens they belong to.
    """

    tile: int
    num_keys: int
    pages: Tensor
    gather: Tensor
    scatter_from: Tensor
    scatter_to: Tensor


@dataclass
class StepAttention:
    """What attention needs to know of one step.

    The step's tokens are: one of each running sample, then prompt tokens, then padding.
    """

    samples: KVRows
    prompts: PromptPages
    sample_rows: Tensor
    sample_positions: Tensor
    prompt_pages: Tensor
    prompt_places: Tensor
    sample_tasks: AttentionTasks
    prompt_tasks: AttentionTasks
    plan_tiles: Callable[[], list[PromptTiles]]
    max_sample_length: int
    _bias: dict[object, Tensor] = field(default_factory=dict)

    @cached_property
    def _tiles(self) -> list[PromptTiles]:
        return self.plan_tiles()

    def attend(
        self,
        layer: int,
        query_NHD: Tensor,
        key_NKD: Tensor,
        value_NKD: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Store the step's keys and values, and give the attention output [N, H, D]."""
        num_samples, num_prompt = len(self.sample_rows), len(self.prompt_pages)
        parts = []
        for store, tasks, attend, first, count in (
            (self.samples, self.sample_tasks, self._attend_samples, 0, num_samples),
            (self.prompts, self.prompt_tasks, self._attend_prompts, num_samples, num_prompt),
        ):
            if count:
                now = slice(first, first + count)
                query, fresh = query_NHD[now], (key_NKD[now], value_NKD[now])
                stored = store.room(layer, *fresh)
                native = _native_attention(query, fresh, stored, tasks, options)
                parts.append(attend(layer, query, fresh, options) if native is None else native)
        padding = len(query_NHD) - num_samples - num_prompt
        if padding:
            parts.append(query_NHD.new_zeros(padding, query_NHD.shape[1], value_NKD.shape[-1]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def keep(self, layer: int, key_NKD: Tensor, value_NKD: Tensor) -> None:
        """Store what belongs to the step's tokens, in a layer that nothing attends to."""
        end = len(self.sample_rows) + len(self.prompt_pages)
        own, prompt = slice(0, len(self.sample_rows)), slice(len(self.sample_rows), end)
        places = self.sample_rows, self.sample_positions
        self.samples.write(layer, *places, key_NKD[own], value_NKD[own])
        places = self.prompt_pages, self.prompt_places
        self.prompts.write(layer, *places, key_NKD[prompt], value_NKD[prompt])

    def parts(self, like_NKD: Tensor) -> tuple[DecoderPart, DecoderPart]:
        """What the compiled decoder wants to know; ``like_NKD`` is like the keys to come."""
        return (
            _part(self.sample_tasks, len(self.sample_rows), self.samples, like_NKD),
            _part(self.prompt_tasks, len(self.prompt_pages), self.prompts, like_NKD),
        )

    def _attend_samples(
        self,
        layer: int,
        query_SHD: Tensor,
        fresh_SKD: tuple[Tensor, Tensor],
        options: AttentionOptions,
    ) -> Tensor:
        self.samples.write(layer, self.sample_rows, self.sample_positions, *fresh_SKD)
        length = round_up(self.max_sample_length, GRAIN)
        key_SKLD, value_SKLD = self.samples.view(layer, len(query_SHD), length)
        num_samples, num_heads, size = query_SHD.shape
        query_SKMD = query_SHD.view(num_samples, key_SKLD.shape[1], -1, size)
        bias = self._sample_bias(length, options.window, query_SHD.dtype)
        out_SKMD = tiled_attention(query_SKMD, key_SKLD, value_SKLD, bias, options)
        return out_SKMD.reshape(num_samples, num_heads, -1)

    def _attend_prompts(
        self,
        layer: int,
        query_NHD: Tensor,
        fresh_NKD: tuple[Tensor, Tensor],
        options: AttentionOptions,
    ) -> Tensor:
        self.prompts.write(layer, self.prompt_pages, self.prompt_places, *fresh_NKD)
        out_NHD = query_NHD.new_empty(*query_NHD.shape[:2], fresh_NKD[1].shape[-1])
        for tiles in self._tiles:
            out = self._attend_tiles(layer, query_NHD, tiles, options)
            out_NHD[tiles.scatter_to] = out[tiles.scatter_from]
        return out_NHD

    def _attend_tiles(
        self, layer: int, query_NHD: Tensor, tiles: PromptTiles, options: AttentionOptions
    ) -> Tensor:
        num_rows, num_queries = tiles.gather.shape
        num_heads, size = query_NHD.shape[1:]
        length = round_up(tiles.num_keys, GRAIN)
        stored = self.prompts.gather(layer, tiles.pages)
        key_BKLD, value_BKLD = (x[:, :, :length] for x in stored)
        kv_heads = key_BKLD.shape[1]
        group = num_heads // kv_heads
        query = query_NHD[tiles.gather].view(num_rows, num_queries, kv_heads, group, size)
        query_BKMD = query.permute(0, 2, 3, 1, 4).reshape(num_rows, kv_heads, -1, size)
        bias = self._tile_bias(tiles, length, group, options.window, query_NHD.dtype)
        out_BKMD = tiled_attention(query_BKMD, key_BKLD, value_BKLD, bias, options)
        out = out_BKMD.reshape(num_rows, kv_heads, group, num_queries, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(num_rows * num_queries, num_heads, -1)

    def _sample_bias(self, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
        key = ("sample", window, dtype)
        if key not in self._bias:
            place = torch.arange(length, device=self.sample_positions.device)
            distance = self.sample_positions[:, None] - place
            self._bias[key] = _bias(distance, window, dtype)[:, None, None]
        return self._bias[key]

    def _tile_bias(
        self,
        tiles: PromptTiles,
        length: int,
        group: int,
        window: int | None,
        dtype: torch.dtype,
    ) -> Tensor:
        key = (tiles.tile, group, window, dtype)
        if key not in self._bias:
            place = torch.arange(length, device=self.prompt_pages.device)
            own = tiles.tile * TILE + place[: tiles.gather.shape[1]]
            bias = _bias(own[:, None] - place, window, dtype)
            self._bias[key] = bias.repeat(group, 1)[None, None]
        return self._bias[key]


def _part(
    tasks: AttentionTasks, num_tokens: int, store: KVRows | PromptPages, like_NKD: Tensor
) -> DecoderPart:
    layers = range(store.num_layers if num_tokens else 0)
    stored = [store.room(layer, like_NKD, like_NKD) for layer in layers]
    return DecoderPart(tasks, num_tokens, stored)


def _native_attention(
    query_NHD: Tensor,
    fresh_NKD: tuple[Tensor, Tensor],
    stored: tuple[Tensor, Tensor],
    tasks: AttentionTasks,
    options: AttentionOptions,
) -> Tensor | None:
    """[N, H, D] by the compiled kernels, which store what is fresh; None where they don't fit."""
    is_plain = options.softcap is None and options.sinks is None
    query_NHD = query_NHD.contiguous()
    if not is_plain or not fits(query_NHD, *stored):
        return None
    key_NKD, value_NKD = (x.contiguous() for x in fresh_NKD)
    out_NHD, _ = attention(
        query_NHD,
        *stored,
        tasks,
        KeyLayout.of_rows(stored[0]),
        options.scale,
        options.window,
        fresh_NGD=(key_NKD, value_NKD),
    )
    return out_NHD


def _bias(distance: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where a key at ``distance`` behind the query is seen, -inf elsewhere."""
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


@contextmanager
def attending(step: StepAttention) -> Iterator[None]:
    """Within, models loaded with `IMPLEMENTATION` attend by ``step`` (in this thread)."""
    _active.step = step
    try:
        yield
    finally:
        _active.step = None


def _attention_function(
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
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The face transformers wants: [1, H, N, D] in, [1, N, H, D] out."""
    step: StepAttention | None = getattr(_active, "step", None)
    if step is None:
        raise RuntimeError(f"{IMPLEMENTATION} attention works inside an engine step only.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scale, sliding_window, softcap, s_aux)
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # an int in every attention module
    query_NHD, key_NKD, value_NKD = (x[0].transpose(0, 1) for x in (query, key, value))
    return step.attend(layer, query_NHD, key_NKD, value_NKD, options).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attention_function)
