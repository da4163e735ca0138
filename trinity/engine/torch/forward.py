"""`Forward`: the forward pass of a step, over samples and pieces of prompts at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trinity.common.models.loading import image_features
from trinity.common.models.routes import Routers
from trinity.engine.torch.attention import StepAttention, attending
from trinity.engine.torch.decoder import CompiledModel
from trinity.engine.torch.jobs import SampleJob, SampleRows
from trinity.engine.torch.kv import TILE, round_up
from trinity.engine.torch.kv_memory import KVMemory, as_keys_and_values
from trinity.engine.torch.pieces import (
    Piece,
    concatenated,
    index_tensor,
    prompt_tasks,
    prompt_tiles,
    sample_tasks,
    wanted_places,
)

_ROWS_MULTIPLE = 8  # fewer rows take other matrix kernels, whose sums differ in the last bit


class Forward:
    """Runs a model on what a step computes; keys and values go into ``memory``.

    Args:
        num_threads: That PyTorch computes with.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        memory: KVMemory,
        num_threads: int,
        routers: Routers | None = None,
    ) -> None:
        self.compiled: CompiledModel | None = None
        """Computes in place of the model's own modules, if there is one."""
        self._model = model
        self._routers = routers
        self._memory = memory
        self._device = model.device
        self._multiple = max(_ROWS_MULTIPLE, 4 * num_threads)

    def __call__(self, rows: SampleRows, pieces: list[Piece]) -> Tensor:
        """Logits [rows + wanted prompt tokens, vocabulary]."""
        tokens, positions, wanted = self._layout(rows, pieces)
        step = self._step_attention(rows, pieces)
        token_ids, position_ids, kept = map(self._padded, (tokens, positions, wanted))
        if self.compiled is not None:
            logits = self.compiled(step, token_ids, position_ids[None], kept)
        else:
            with attending(step), self._noting_routes(step):
                logits = self._model(
                    **self._inputs(token_ids, len(rows), pieces),
                    position_ids=position_ids[None],
                    use_cache=False,
                    logits_to_keep=kept,
                ).logits[0]
        return logits[: len(wanted)]

    @contextmanager
    def _noting_routes(self, step: StepAttention) -> Iterator[None]:
        """Within, the routes of a pass are kept beside its keys and values, if they are wanted."""
        if self._routers is None:
            yield
            return
        with self._routers.noting() as noted:
            yield
            step.keep(self._memory.routes_layer, *as_keys_and_values(noted()))

    def _layout(
        self, rows: SampleRows, pieces: list[Piece]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens of the step, their positions, and which of them need logits."""
        place = len(rows)
        tokens = [rows.last_tokens] if place else []
        positions = [rows.lengths - 1] if place else []
        wanted = [np.arange(place)]
        for piece in pieces:
            tokens.append(piece.job.tokens[piece.start : piece.end])
            positions.append(np.arange(piece.start, piece.end))
            wanted.append(place + wanted_places(piece))
            place += piece.end - piece.start
        return np.concatenate(tokens), np.concatenate(positions), np.concatenate(wanted)

    def _padded(self, values: np.ndarray) -> Tensor:
        out = np.zeros(round_up(max(len(values), 1), self._multiple), dtype=np.int64)
        out[: len(values)] = values
        return torch.from_numpy(out).to(self._device)

    def _inputs(self, token_ids: Tensor, place: int, pieces: list[Piece]) -> dict[str, Tensor]:
        """The tokens of a step; as embeddings if some of them are images.

        Args:
            place: Where the first piece begins.
        """
        embeds: Tensor | None = None
        for piece in pieces:
            job = piece.job
            if isinstance(job, SampleJob) and job.images is not None:
                if embeds is None:
                    embeds = self._model.get_input_embeddings()(token_ids)
                inside, found = self._image_tokens(piece, job)
                embeds[self._tensor(place + inside)] = found.to(embeds.dtype)
            place += piece.end - piece.start
        return {"input_ids": token_ids[None]} if embeds is None else {"inputs_embeds": embeds[None]}

    def _image_tokens(self, piece: Piece, job: SampleJob) -> tuple[np.ndarray, Tensor]:
        """Which tokens of a piece are images, and their embeddings."""
        if job.image_features is None:
            assert job.images is not None, "a job without images has no features of them"
            job.image_features = image_features(self._model, job.images)
        is_image = job.tokens == self._model.config.image_token_id
        inside = np.flatnonzero(is_image[piece.start : piece.end])
        before = int(is_image[: piece.start].sum())
        return inside, job.image_features[before : before + len(inside)]

    def _step_attention(self, rows: SampleRows, pieces: list[Piece]) -> StepAttention:
        lengths = rows.lengths
        longest = int(lengths.max(initial=0))
        if len(rows):
            self._memory.reserve(rows, longest)
        spans = [np.arange(piece.start, piece.end) for piece in pieces]
        pages = [piece.slot.pages[span // TILE] for piece, span in zip(pieces, spans, strict=True)]
        return StepAttention(
            samples=self._memory.samples,
            prompts=self._memory.prompts,
            sample_rows=torch.arange(len(rows), device=self._device),
            sample_positions=self._tensor(lengths - 1),
            prompt_pages=self._tensor(concatenated(pages)),
            prompt_places=self._tensor(concatenated(spans) % TILE),
            sample_tasks=sample_tasks(rows),
            prompt_tasks=prompt_tasks(pieces),
            plan_tiles=partial(prompt_tiles, pieces, self._device),
            max_sample_length=longest,
        )

    def _tensor(self, values: np.ndarray) -> Tensor:
        return index_tensor(values, self._device)
