"""Continuous batching: which tokens go into the next forward pass, and what comes of them.

Synchronous and free of threads: `TorchEngine` runs it in its worker. Each `Batcher.step`
computes one token of every running sample together with pieces of waiting prompts.
"""

from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trinity.common.models.loading import image_features
from trinity.common.models.protocol import FinishReason
from trinity.engine.torch.attention import StepAttention, attending
from trinity.engine.torch.decoder import CompiledModel, compiled_model
from trinity.engine.torch.jobs import Job, SampleJob, SampleRows, ScoreJob
from trinity.engine.torch.kv import GRAIN, TILE, KVRows, round_up
from trinity.engine.torch.pieces import (
    Piece,
    concatenated,
    index_tensor,
    prompt_tasks,
    prompt_tiles,
    sample_tasks,
    wanted_places,
)
from trinity.engine.torch.prompt_pages import PromptPages
from trinity.engine.torch.sampler import DrawParams, draw, token_logprobs, uniform

_PROBE_TOKENS = 4
_SHORT = 256  # positions of a row that are not worth growing into
_KEPT_BYTES = 2**26  # a store of this size is not worth freeing between two batches
_ROWS_MULTIPLE = 8  # fewer rows take other matrix kernels, whose sums differ in the last bit


@dataclass(frozen=True)
class Limits:
    """What fits into one step and into memory."""

    max_batch_tokens: int
    max_running: int
    max_kv_bytes: int
    max_kept_bytes: int
    num_threads: int = 1

    def share(self, share: float) -> "Limits":
        """With that part of the memory."""
        kv, kept = int(self.max_kv_bytes * share), int(self.max_kept_bytes * share)
        return replace(self, max_kv_bytes=kv, max_kept_bytes=kept)


@dataclass(frozen=True)
class _Load:
    """What a set of jobs may come to need: sample rows, the longest of them, prompt tokens."""

    jobs: int = 0
    rows: int = 0
    longest: int = 0
    prompt_tokens: int = 0

    def with_job(self, job: Job) -> "_Load":
        prompt_tokens = self.prompt_tokens + round_up(len(job.tokens))
        if not isinstance(job, SampleJob):
            return replace(self, jobs=self.jobs + 1, prompt_tokens=prompt_tokens)
        return _Load(
            self.jobs + 1,
            self.rows + job.params.n - job.num_started,
            max(self.longest, job.longest),
            prompt_tokens,
        )


class Batcher:
    """Runs jobs on a model, as many at a time as fit.

    Jobs wait (`waiting`), have their prompt computed (`prefilling`), and then, if they sample,
    run (`rows`). Samples that don't fit yet wait as `ready` jobs.
    """

    def __init__(self, model: PreTrainedModel, limits: Limits, eos_ids: tuple[int, ...]) -> None:
        self.model = model
        self._limits = limits
        self._eos_ids = np.asarray(eos_ids, dtype=np.int64)
        self._device = model.device
        num_layers = model.config.get_text_config().num_hidden_layers
        self._samples = KVRows(num_layers)
        self._num_layers = num_layers
        self._prompts = PromptPages(num_layers, limits.max_kept_bytes)
        self._bytes_per_token = 0.0
        self._compiled: CompiledModel | None = None
        self._multiple = max(_ROWS_MULTIPLE, 4 * limits.num_threads)
        self.rows = SampleRows()
        self.waiting: deque[Job] = deque()
        self.prefilling: list[Job] = []
        self.ready: deque[SampleJob] = deque()
        self.version = 0
        self.num_tokens = 0
        self.num_steps = 0

    @property
    def has_running(self) -> bool:
        """Whether some job has been started and is not done."""
        return bool(self.prefilling or self.ready or len(self.rows))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or self.has_running

    @property
    def kv_bytes(self) -> int:
        return self._samples.size_bytes + self._prompts.size_bytes

    def probe(self) -> None:
        """Run a few tokens through the model, and see whether it can be compiled.

        Raises:
            ValueError: The model does not attend by the function given to it.
        """
        scores = self._probe_scores()
        self._compiled = compiled_model(self.model)
        if self._compiled is not None and self._probe_scores() != scores:
            self._compiled = None
        if not self._bytes_per_token or not scores:
            raise ValueError(
                f"A model of type {self.model.config.model_type!r} does not take an attention "
                "function, which the torch engine needs. Use another engine_type."
            )

    def _probe_scores(self) -> list[float]:
        job = ScoreJob(range(_PROBE_TOKENS), 1.0, lambda _: None)
        self.submit(job)
        self.step()
        return job.logprobs

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    @torch.inference_mode()
    def step(self, may_admit: bool = True) -> None:
        """Compute the next token of every running sample and the next pieces of prompts.

        Args:
            may_admit: Whether waiting jobs may start.
        """
        self._drop_cancelled()
        if may_admit:
            self._admit()
        pieces = self._choose_pieces()
        if pieces or len(self.rows):
            logits = self._forward(pieces)
            num_rows = len(self.rows)
            self._finish_pieces(pieces, logits[num_rows:])
            self._start_samples(logits[:num_rows])
        elif self.ready:
            self._start_samples(None)
        if not self.has_running:
            self._free_memory()

    def forget_prompts(self) -> None:
        """Use no keys and values of earlier requests any more: the weights have changed."""
        self._prompts.forget()
        self._prompts.clear_if_empty()

    def restart_running(self) -> None:
        """Send every started job back to the start of the queue, without progress."""
        jobs = self._started_jobs()
        self._forget_running()
        for job in reversed(jobs):
            job.restart()
            self.waiting.appendleft(job)

    def fail_all(self, error: BaseException) -> None:
        """End every job with ``error``."""
        jobs = [*self._started_jobs(), *self.waiting]
        self._forget_running()
        self.waiting.clear()
        for job in jobs:
            job.error = error
            job.on_done(job)

    def tokens_so_far(self, job: SampleJob) -> list[list[int]]:
        """The new tokens of each sample of ``job``."""
        done = [[] if c is None else list(c.token_ids) for c in job.completions]
        for row, other in enumerate(self.rows.jobs):
            if other is job:
                done[self.rows["index"][row]] = self.rows.new_tokens(row).tolist()
        return done

    def _started_jobs(self) -> list[Job]:
        jobs: list[Job] = [*self.rows.jobs, *self.ready, *self.prefilling]
        return list(dict.fromkeys(jobs))

    def _forget_running(self) -> None:
        for job in self._started_jobs():
            self._close_slot(job)
        self.rows = SampleRows()
        self.prefilling = []
        self.ready.clear()
        self._free_memory()

    def _free_memory(self) -> None:
        self._samples.clear(_KEPT_BYTES)
        self._prompts.clear_if_empty()

    # Choosing

    def _drop_cancelled(self) -> None:
        if any(job.is_cancelled for job in self.waiting):
            self.waiting = deque(job for job in self.waiting if not job.is_cancelled)
        cancelled = [job for job in (*self.prefilling, *self.ready) if job.is_cancelled]
        if cancelled:
            self.prefilling = [job for job in self.prefilling if not job.is_cancelled]
            self.ready = deque(job for job in self.ready if not job.is_cancelled)
        for job in cancelled:
            self._close_slot(job)
        gone = [row for row, job in enumerate(self.rows.jobs) if job.is_cancelled]
        if gone:
            self._remove_rows(np.array(gone))

    def _admit(self) -> None:
        """Start waiting jobs, first come first served, as long as memory lasts for the longest."""
        if not self.waiting:
            return
        load = _Load()
        for job in self._started_jobs():
            load = load.with_job(job)
        load = replace(load, rows=load.rows + len(self.rows))
        held: list[Job] = []
        while self.waiting:
            job = self.waiting[0]
            more = load.with_job(job)
            if load.jobs and not self._fits(more):
                break
            self.waiting.popleft()
            is_shared = isinstance(job, SampleJob) and job.images is None
            job.slot = self._prompts.open(job.tokens, is_shared=is_shared)
            if job.slot is None:
                held.append(job)
                continue
            job.num_computed = job.slot.num_known
            load = more
            self.prefilling.append(job)
        self.waiting.extendleft(reversed(held))

    def _fits(self, load: "_Load") -> bool:
        rows = min(load.rows, self._limits.max_running)
        tokens = rows * round_up(load.longest) + load.prompt_tokens
        return (
            load.jobs <= self._limits.max_running
            and tokens * self._bytes_per_token <= self._limits.max_kv_bytes
        )

    def _choose_pieces(self) -> list[Piece]:
        """Prompt pieces up to the budget, first come first served; cut at tile borders."""
        budget = self._limits.max_batch_tokens
        pieces = []
        for job in self.prefilling:
            if budget < min(TILE, job.num_left):
                break
            start, end = job.num_computed, len(job.tokens)
            if end - start > budget:
                end = (start + budget) // TILE * TILE
            pieces.append(Piece(job, start, end))
            budget -= end - start
        return pieces

    def _close_slot(self, job: Job) -> None:
        if job.slot is not None:
            self._prompts.close(job.slot)
            job.slot = None

    # Computing

    def _forward(self, pieces: list[Piece]) -> Tensor:
        """Logits [rows + wanted prompt tokens, vocabulary]."""
        num_rows = len(self.rows)
        lengths = self.rows.lengths
        tokens = [self.rows.last_tokens] if num_rows else []
        positions = [lengths - 1] if num_rows else []
        wanted = [np.arange(num_rows)]
        place = num_rows
        for piece in pieces:
            tokens.append(piece.job.tokens[piece.start : piece.end])
            positions.append(np.arange(piece.start, piece.end))
            wanted.append(place + wanted_places(piece))
            place += piece.end - piece.start
        step = self._step_attention(pieces, lengths)
        keep = np.concatenate(wanted)
        token_ids, position_ids, kept = (
            self._padded(values, self._multiple)
            for values in (np.concatenate(tokens), np.concatenate(positions), keep)
        )
        if self._compiled is not None:
            logits = self._compiled(step, token_ids, position_ids[None], kept)
        else:
            with attending(step):
                logits = self.model(
                    **self._inputs(token_ids, pieces),
                    position_ids=position_ids[None],
                    use_cache=False,
                    logits_to_keep=kept,
                ).logits[0]
        self.num_steps += 1
        self._bytes_per_token = self._bytes_per_token or self._prompts.bytes_per_token
        return logits[: len(keep)]

    def _inputs(self, token_ids: Tensor, pieces: list[Piece]) -> dict[str, Tensor]:
        """The tokens of a step; as embeddings if some of them are images."""
        place = len(self.rows)
        embeds: Tensor | None = None
        for piece in pieces:
            job = piece.job
            if isinstance(job, SampleJob) and job.images is not None:
                if embeds is None:
                    embeds = self.model.get_input_embeddings()(token_ids)
                if job.image_features is None:
                    job.image_features = image_features(self.model, job.images)
                is_image = job.tokens == self.model.config.image_token_id
                inside = np.flatnonzero(is_image[piece.start : piece.end])
                before = int(is_image[: piece.start].sum())
                found = job.image_features[before : before + len(inside)]
                embeds[self._tensor(place + inside)] = found.to(embeds.dtype)
            place += piece.end - piece.start
        return {"input_ids": token_ids[None]} if embeds is None else {"inputs_embeds": embeds[None]}

    def _padded(self, values: np.ndarray, multiple: int) -> Tensor:
        out = np.zeros(round_up(max(len(values), 1), multiple), dtype=np.int64)
        out[: len(values)] = values
        return torch.from_numpy(out).to(self._device)

    def _step_attention(self, pieces: list[Piece], lengths: np.ndarray) -> StepAttention:
        longest = int(lengths.max(initial=0))
        if len(lengths):
            self._reserve(longest)
        spans = [np.arange(piece.start, piece.end) for piece in pieces]
        pages = [piece.slot.pages[span // TILE] for piece, span in zip(pieces, spans, strict=True)]
        return StepAttention(
            samples=self._samples,
            prompts=self._prompts,
            sample_rows=torch.arange(len(lengths), device=self._device),
            sample_positions=self._tensor(lengths - 1),
            prompt_pages=self._tensor(concatenated(pages)),
            prompt_places=self._tensor(concatenated(spans) % TILE),
            sample_tasks=sample_tasks(self.rows),
            prompt_tasks=prompt_tasks(pieces),
            plan_tiles=partial(prompt_tiles, pieces, self._device),
            max_sample_length=longest,
        )

    def _tensor(self, values: np.ndarray) -> Tensor:
        return index_tensor(values, self._device)

    # What comes of it

    def _finish_pieces(self, pieces: list[Piece], logits: Tensor) -> None:
        """Note the progress of prompts; ``logits`` are those of the pieces' wanted places."""
        place = 0
        for piece in pieces:
            job, count = piece.job, len(wanted_places(piece))
            job.num_computed = piece.end
            self._prompts.publish(piece.slot, piece.end, len(job.tokens))
            if isinstance(job, ScoreJob):
                now = slice(piece.start + 1, piece.start + 1 + count)
                following = self._tensor(job.tokens[now])
                found = token_logprobs(logits[place : place + count], following, job.temperature)
                job.logprobs += found.tolist()
            elif isinstance(job, SampleJob) and piece.completes:
                job.first_logits, job.first_version = logits[place].clone(), self.version
                self.ready.append(job)
            place += count
            if piece.completes:
                self.prefilling.remove(job)
                if isinstance(job, ScoreJob):
                    self._close_slot(job)
                    job.on_done(job)

    def _start_samples(self, running_logits: Tensor | None) -> None:
        """Give running samples their next token, and as many ready ones as fit their first."""
        logits = [] if running_logits is None else [running_logits]
        versions = [np.full(len(self.rows), self.version)]
        first, started = len(self.rows), []
        while self.ready and len(self.rows) < self._limits.max_running:
            job = self.ready[0]
            room = self._limits.max_running - len(self.rows)
            count = min(room, job.params.n - job.num_started)
            self.rows.add(job, range(job.num_started, job.num_started + count))
            started.append((job, count))
            assert job.first_logits is not None, "a ready job has no logits"
            logits.append(job.first_logits.expand(count, -1))
            versions.append(np.full(count, job.first_version))
            job.num_started += count
            if job.num_started == job.params.n:
                self.ready.popleft()
        self._copy_prompts(first, started)
        if len(self.rows):
            only_running = running_logits if not started else None
            whole = torch.cat(logits) if only_running is None else only_running
            self._draw(whole, np.concatenate(versions))

    def _copy_prompts(self, first: int, started: list[tuple[SampleJob, int]]) -> None:
        """Give each new sample a row with its prompt's keys and values."""
        if not started:
            return
        longest = max(len(job.tokens) for job, _ in started)
        self._reserve(longest + 1)
        for _, group in groupby(started, key=lambda entry: -(-len(entry[0].tokens) // TILE)):
            entries = list(group)
            pages = [job.slot.pages for job, _ in entries if job.slot is not None]
            counts = [count for _, count in entries]
            chosen = self._tensor(np.repeat(np.stack(pages), counts, axis=0))
            for layer in range(self._num_layers):
                self._samples.fill(layer, first, *self._prompts.gather(layer, chosen))
            first += len(chosen)
        for job, _ in started:
            if job.num_started == job.params.n:
                self._close_slot(job)
                job.first_logits = None

    def _reserve(self, longest: int) -> None:
        """Room for ``longest`` positions in each row; for all of short samples, to copy none."""
        end = int((self.rows["prompt_length"] + self.rows["max_tokens"]).max(initial=0))
        length = max(longest, min(end, _SHORT))
        self._samples.reserve(len(self.rows), round_up(length, GRAIN))

    def _draw(self, logits: Tensor, versions: np.ndarray) -> None:
        """One token for every row, then the end of those that are done."""
        rows = self.rows
        logits = self._penalised(logits)
        params = DrawParams(
            temperature=rows["temperature"],
            top_p=rows["top_p"],
            top_k=rows["top_k"],
            min_p=rows["min_p"],
            uniform=uniform(rows["stream_key"], rows["count"]),
            forbidden=self._forbidden(),
        )
        tokens, logprobs = draw(logits, params)
        rows.append(tokens, logprobs, versions)
        self.num_tokens += len(tokens)
        self._end_finished(tokens)

    def _penalised(self, logits: Tensor) -> Tensor:
        rows = np.flatnonzero(self.rows["repetition_penalty"] != 1).tolist()
        if rows:
            logits = logits.to(torch.float32, copy=True)
        for row in rows:
            penalty = float(self.rows["repetition_penalty"][row])
            seen = np.concatenate([self.rows.jobs[row].tokens, self.rows.new_tokens(row)])
            ids = self._tensor(np.unique(seen))
            value = logits[row, ids]
            logits[row, ids] = torch.where(value > 0, value / penalty, value * penalty)
        return logits

    def _forbidden(self) -> dict[int, list[int]]:
        """Rows that must not end yet, and the ids that would end them."""
        too_short = np.flatnonzero(self.rows["count"] < self.rows["min_tokens"])
        return {int(row): self.rows.jobs[row].stop_ids for row in too_short}

    def _end_finished(self, tokens: np.ndarray) -> None:
        rows = self.rows
        is_stopped = self._is_stopped(tokens)
        is_long = rows["count"] >= rows["max_tokens"]
        finished = np.flatnonzero(is_stopped | is_long)
        if not len(finished):
            return
        done: list[SampleJob] = []
        for row in finished.tolist():
            job = rows.jobs[row]
            reason: FinishReason = "stop" if is_stopped[row] else "length"
            job.completions[rows["index"][row]] = rows.completion(row, reason)
            if all(completion is not None for completion in job.completions):
                done.append(job)
        self._remove_rows(finished)
        for job in done:
            job.on_done(job)

    def _is_stopped(self, tokens: np.ndarray) -> np.ndarray:
        is_stopped = np.isin(tokens, self._eos_ids)
        for row in np.flatnonzero(~self.rows["is_usual"]).tolist():
            is_stopped[row] = self._stops(self.rows.jobs[row], row, int(tokens[row]))
        return is_stopped

    def _stops(self, job: SampleJob, row: int, token: int) -> bool:
        if token in job.stop_ids:
            return True
        is_long_enough = self.rows["count"][row] >= job.params.min_tokens
        return bool(
            is_long_enough
            and job.has_stop_text is not None
            and job.has_stop_text(self.rows.new_tokens(row).tolist())
        )

    def _remove_rows(self, rows: np.ndarray) -> None:
        length = round_up(int(self.rows.lengths.max(initial=0)))
        source, target = self.rows.remove(rows)
        if len(source):
            length = min(length, self._samples.length)
            self._samples.move(self._tensor(source), self._tensor(target), length)
