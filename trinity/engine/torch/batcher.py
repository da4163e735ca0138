"""Continuous batching: which tokens go into the next forward pass, and what comes of them.

Synchronous and free of threads: `TorchEngine` runs it in its worker. Each `Batcher.step`
computes one token of every running sample together with pieces of waiting prompts.
"""

from collections import deque

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trinity.common.models.protocol import FinishReason
from trinity.common.models.routes import Routers
from trinity.engine.torch.decoder import compiled_model
from trinity.engine.torch.forward import Forward
from trinity.engine.torch.jobs import Job, SampleJob, SampleRows, ScoreJob
from trinity.engine.torch.kv import TILE
from trinity.engine.torch.kv_memory import KVMemory
from trinity.engine.torch.limits import Limits, Load
from trinity.engine.torch.next_tokens import is_stopped, next_tokens
from trinity.engine.torch.pieces import Piece, index_tensor, wanted_places
from trinity.engine.torch.sampler import token_logprobs

_PROBE_TOKENS = 4


class Batcher:
    """Runs jobs on a model, as many at a time as fit.

    Jobs wait (`waiting`), have their prompt computed (`prefilling`), and then, if they sample,
    run (`rows`). Samples that don't fit yet wait as `ready` jobs.

    Args:
        routers: The model's, if completions are to tell `routes`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        limits: Limits,
        eos_ids: tuple[int, ...],
        routers: Routers | None = None,
    ) -> None:
        self.model = model
        self._limits = limits
        self._eos_ids = np.asarray(eos_ids, dtype=np.int64)
        num_layers = model.config.get_text_config().num_hidden_layers
        self._memory = KVMemory(num_layers, limits.max_kept_bytes, model.device, routers)
        self.forward = Forward(model, self._memory, limits.num_threads, routers)
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
        return self._memory.size_bytes

    def probe(self) -> None:
        """Run a few tokens through the model, and see whether it can be compiled.

        Raises:
            ValueError: The model does not attend by the function given to it.
        """
        scores = self._probe_scores()
        self.forward.compiled = compiled_model(self.model)
        if self.forward.compiled is not None and self._probe_scores() != scores:
            self.forward.compiled = None
        if not self._memory.bytes_per_token or not scores:
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
            logits = self.forward(self.rows, pieces)
            self.num_steps += 1
            num_rows = len(self.rows)
            self._finish_pieces(pieces, logits[num_rows:])
            self._sample(logits[:num_rows])
        elif self.ready:
            self._sample(None)
        if not self.has_running:
            self._memory.free()

    def renew(self, version: int) -> None:
        """Go on with the weights of ``version``, which the model has now.

        Samples that run keep their tokens, each with its version. Scores have one version for all
        of theirs, so they begin anew.
        """
        self.version = version
        self._memory.forget_prompts()
        scored = [job for job in self.prefilling if isinstance(job, ScoreJob)]
        self.prefilling = [job for job in self.prefilling if not isinstance(job, ScoreJob)]
        for job in reversed(scored):
            self._memory.close(job)
            job.restart()
            self.waiting.appendleft(job)

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
            self._memory.close(job)
        self.rows = SampleRows()
        self.prefilling = []
        self.ready.clear()
        self._memory.free()

    # Choosing

    def _drop_cancelled(self) -> None:
        if any(job.is_cancelled for job in self.waiting):
            self.waiting = deque(job for job in self.waiting if not job.is_cancelled)
        cancelled = [job for job in (*self.prefilling, *self.ready) if job.is_cancelled]
        if cancelled:
            self.prefilling = [job for job in self.prefilling if not job.is_cancelled]
            self.ready = deque(job for job in self.ready if not job.is_cancelled)
        for job in cancelled:
            self._memory.close(job)
        gone = [row for row, job in enumerate(self.rows.jobs) if job.is_cancelled]
        if gone:
            self._memory.remove_rows(self.rows, np.array(gone))

    def _admit(self) -> None:
        """Start waiting jobs, first come first served, as long as memory lasts for the longest."""
        if not self.waiting:
            return
        load = Load.of(self._started_jobs(), len(self.rows))
        held: list[Job] = []
        while self.waiting:
            job = self.waiting[0]
            more = load.with_job(job)
            if load.jobs and not more.fits(self._limits, self._memory.bytes_per_token):
                break
            self.waiting.popleft()
            if self._memory.open(job):
                load = more
                self.prefilling.append(job)
            else:
                held.append(job)
        self.waiting.extendleft(reversed(held))

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

    # What comes of it

    def _finish_pieces(self, pieces: list[Piece], logits: Tensor) -> None:
        """Note the progress of prompts; ``logits`` are those of the pieces' wanted places."""
        place = 0
        for piece in pieces:
            count = len(wanted_places(piece))
            self._finish(piece, logits[place : place + count])
            place += count

    def _finish(self, piece: Piece, logits: Tensor) -> None:
        job = piece.job
        job.num_computed = piece.end
        self._memory.prompts.publish(piece.slot, piece.end, len(job.tokens))
        if isinstance(job, ScoreJob):
            now = slice(piece.start + 1, piece.start + 1 + len(logits))
            following = index_tensor(job.tokens[now], logits.device)
            job.logprobs += token_logprobs(logits, following, job.temperature).tolist()
        elif isinstance(job, SampleJob) and piece.completes:
            job.first_logits, job.first_version = logits[0].clone(), self.version
            self.ready.append(job)
        if piece.completes:
            self.prefilling.remove(job)
            if isinstance(job, ScoreJob):
                self._memory.close(job)
                job.on_done(job)

    def _sample(self, running_logits: Tensor | None) -> None:
        """Give running samples their next token, and as many ready ones as fit their first."""
        logits = [] if running_logits is None else [running_logits]
        first = len(self.rows)
        versions = [np.full(first, self.version)]
        started = self._start_ready()
        for job, count in started:
            assert job.first_logits is not None, "a ready job has no logits"
            logits.append(job.first_logits.expand(count, -1))
            versions.append(np.full(count, job.first_version))
        self._memory.copy_prompts(self.rows, first, started)
        for job, _ in started:
            if job.num_started == job.params.n:
                self._memory.close(job)
                job.first_logits = None
        if len(self.rows):
            only_running = running_logits if not started else None
            whole = torch.cat(logits) if only_running is None else only_running
            self._draw(whole, np.concatenate(versions))

    def _start_ready(self) -> list[tuple[SampleJob, int]]:
        """Rows for samples of ready jobs, as far as there are any: jobs, and how many of each."""
        started = []
        while self.ready and len(self.rows) < self._limits.max_running:
            job = self.ready[0]
            room = self._limits.max_running - len(self.rows)
            count = min(room, job.params.n - job.num_started)
            self.rows.add(job, range(job.num_started, job.num_started + count))
            started.append((job, count))
            job.num_started += count
            if job.num_started == job.params.n:
                self.ready.popleft()
        return started

    def _draw(self, logits: Tensor, versions: np.ndarray) -> None:
        """One token for every row, then the end of those that are done."""
        tokens, logprobs = next_tokens(self.rows, logits)
        self.rows.append(tokens, logprobs, versions)
        self.num_tokens += len(tokens)
        self._end_finished(is_stopped(self.rows, tokens, self._eos_ids))

    def _end_finished(self, stopped: np.ndarray) -> None:
        rows = self.rows
        finished = np.flatnonzero(stopped | (rows["count"] >= rows["max_tokens"]))
        if not len(finished):
            return
        done: list[SampleJob] = []
        for row in finished.tolist():
            job = rows.jobs[row]
            reason: FinishReason = "stop" if stopped[row] else "length"
            completion = rows.completion(row, reason)
            completion.routes = self._memory.routes(row, int(rows.lengths[row]))
            job.completions[rows["index"][row]] = completion
            if all(completion is not None for completion in job.completions):
                done.append(job)
        self._memory.remove_rows(rows, finished)
        for job in done:
            job.on_done(job)
