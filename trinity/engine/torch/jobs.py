"""What an engine works on: sampling jobs and scoring jobs, and the rows of running samples."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from trinity.common.models.protocol import Completion, FinishReason, SamplingParams
from trinity.engine.torch.prompt_pages import PromptSlot

StopCheck = Callable[[Sequence[int]], bool]


class Job:
    """Tokens to compute, and what to do with the outcome.

    Args:
        tokens: The tokens whose keys and values are computed first.
        on_done: Gets the job once `outcome` or `error` is set.
    """

    def __init__(self, tokens: Sequence[int], on_done: Callable[["Job"], None]) -> None:
        self.tokens = np.asarray(tokens, dtype=np.int64)
        self.on_done = on_done
        self.adapter: str | None = None
        """Name of the adapter beside the model that computes them; None: the model itself."""
        self.error: BaseException | None = None
        self.is_cancelled = False
        self.slot: PromptSlot | None = None
        self.num_computed = 0

    @property
    def num_left(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.tokens) - self.num_computed

    def restart(self) -> None:
        """Forget all progress."""
        self.slot = None
        self.num_computed = 0


class ScoreJob(Job):
    """Log-probabilities of given tokens; `logprobs` is the outcome."""

    def __init__(
        self, tokens: Sequence[int], temperature: float, on_done: Callable[[Job], None]
    ) -> None:
        super().__init__(tokens, on_done)
        self.temperature = temperature
        self.logprobs: list[float] = []

    def restart(self) -> None:
        super().restart()
        self.logprobs = []


class SampleJob(Job):
    """``params.n`` samples of one prompt; `completions` is the outcome.

    Args:
        stream_keys: Random stream of each sample.
        max_tokens: New tokens at most, within the engine's limits.
        stop_ids: All token ids that end a sample.
        is_usual: Whether those are the engine's own, and nothing else ends a sample.
        has_stop_text: Says whether the new tokens contain a stop text; None without any.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        on_done: Callable[[Job], None],
        *,
        stream_keys: Sequence[int],
        max_tokens: int,
        stop_ids: Sequence[int],
        is_usual: bool,
        has_stop_text: StopCheck | None = None,
    ) -> None:
        super().__init__(tokens, on_done)
        self.params = params
        self.images: Tensor | None = None
        """[images, C, H, W] of the prompt."""
        self.image_features: Tensor | None = None
        """[tokens of images, D] in place of their embeddings; made by the step that needs it."""
        self.stream_keys = stream_keys
        self.max_tokens = max_tokens
        self.stop_ids = list(stop_ids)
        self.is_usual = is_usual
        self.has_stop_text = has_stop_text
        self.first_logits: Tensor | None = None
        self.first_version = 0
        self.num_started = 0
        self.completions: list[Completion | None] = [None] * params.n

    @property
    def longest(self) -> int:
        """Tokens of the longest sample this job may give, prompt included."""
        return len(self.tokens) + self.max_tokens

    def restart(self) -> None:
        super().restart()
        self.first_logits = self.image_features = None
        self.num_started = 0
        self.completions = [None] * self.params.n


_ROW = np.dtype(
    [
        ("job", np.int64),
        ("index", np.int64),
        ("prompt_length", np.int64),
        ("count", np.int64),
        ("max_tokens", np.int64),
        ("min_tokens", np.int64),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("min_p", np.float64),
        ("stream_key", np.uint64),
        ("repetition_penalty", np.float64),
        ("is_usual", np.bool_),
    ]
)


class SampleRows:
    """The running samples as columns: row i here is row i of the key/value store.

    Rows are dense: `remove` fills the holes with the last rows and says which moved.
    """

    def __init__(self) -> None:
        self._table = np.zeros(0, dtype=_ROW)
        self._tokens = np.zeros((0, 0), dtype=np.int32)
        self._logprobs = np.zeros((0, 0), dtype=np.float32)
        self._versions = np.zeros((0, 0), dtype=np.int32)
        self.jobs: list[SampleJob] = []

    def __len__(self) -> int:
        return len(self.jobs)

    def __getitem__(self, column: str) -> np.ndarray:
        return self._table[column][: len(self.jobs)]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample so far, prompt included."""
        return self["prompt_length"] + self["count"]

    @property
    def last_tokens(self) -> np.ndarray:
        return self._tokens[np.arange(len(self)), self["count"] - 1]

    def new_tokens(self, row: int) -> np.ndarray:
        """The sampled tokens of a row."""
        return self._tokens[row, : self._table["count"][row]]

    def add(self, job: SampleJob, indexes: Sequence[int]) -> None:
        """Start samples of ``job``; they have no tokens yet."""
        params, first = job.params, len(self)
        self._grow(first + len(indexes), 0)
        values = (
            len(job.tokens),
            0,
            job.max_tokens,
            params.min_tokens,
            params.temperature,
            params.top_p,
            params.top_k,
            params.min_p,
        )
        for offset, index in enumerate(indexes):
            key, penalty = job.stream_keys[index], params.repetition_penalty
            self._table[first + offset] = (id(job), index, *values, key, penalty, job.is_usual)
            self.jobs.append(job)

    def append(self, tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray) -> None:
        """One more token for every row."""
        count = self["count"]
        self._grow(len(self), int(count.max(initial=0)) + 1)
        rows = np.arange(len(self))
        self._tokens[rows, count] = tokens
        self._logprobs[rows, count] = logprobs
        self._versions[rows, count] = versions
        count += 1

    def completion(self, row: int, reason: FinishReason) -> Completion:
        count = self._table["count"][row]
        return Completion(
            self._tokens[row, :count].tolist(),
            self._logprobs[row, :count].tolist(),
            reason,
            self._versions[row, :count].tolist(),
        )

    def remove(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drop ``rows``; (source, target) of the rows that moved into the holes."""
        left = len(self) - len(rows)
        gone = np.zeros(len(self), dtype=bool)
        gone[rows] = True
        target = np.flatnonzero(gone[:left])
        source = left + np.flatnonzero(~gone[left:])
        for column in (self._table, self._tokens, self._logprobs, self._versions):
            column[target] = column[source]
        for source_row, target_row in zip(source, target, strict=True):
            self.jobs[target_row] = self.jobs[source_row]
        del self.jobs[left:]
        return source, target

    def _grow(self, num_rows: int, num_tokens: int) -> None:
        rows, width = self._tokens.shape
        if num_rows > rows or num_tokens > width:
            rows = rows if num_rows <= rows else max(num_rows, 2 * rows)
            width = width if 0 < num_tokens <= width else max(width, 2 * num_tokens, 32)
            self._table = _enlarged(self._table, (rows,))
            self._tokens = _enlarged(self._tokens, (rows, width))
            self._logprobs = _enlarged(self._logprobs, (rows, width))
            self._versions = _enlarged(self._versions, (rows, width))


def _enlarged(old: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    new = np.zeros(shape, dtype=old.dtype)
    new[tuple(slice(0, size) for size in old.shape)] = old
    return new
