"""What may be computed at a time: the limits of an engine, and what a set of jobs may come to."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from trinity.engine.torch.jobs import Job, SampleJob
from trinity.engine.torch.kv import TILE, round_up


@dataclass(frozen=True)
class Limits:
    """What fits into one step and into memory.

    Raises:
        ValueError: A step could do nothing, and the engine would never be done.
    """

    max_batch_tokens: int
    max_running: int
    max_kv_bytes: int
    max_kept_bytes: int
    num_threads: int = 1

    def __post_init__(self) -> None:
        for name, least in (("max_batch_tokens", TILE), ("max_running", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}.")

    def share(self, share: float) -> "Limits":
        """With that part of the memory."""
        kv, kept = int(self.max_kv_bytes * share), int(self.max_kept_bytes * share)
        return replace(self, max_kv_bytes=kv, max_kept_bytes=kept)


@dataclass(frozen=True)
class Load:
    """What a set of jobs may come to need: sample rows, the longest of them, prompt tokens."""

    jobs: int = 0
    rows: int = 0
    longest: int = 0
    prompt_tokens: int = 0

    @classmethod
    def of(cls, jobs: Iterable[Job], num_running: int) -> "Load":
        """That of ``jobs``, of whose samples ``num_running`` are running."""
        load = cls(rows=num_running)
        for job in jobs:
            load = load.with_job(job)
        return load

    def with_job(self, job: Job) -> "Load":
        """That of one job more."""
        prompt_tokens = self.prompt_tokens + round_up(len(job.tokens))
        if not isinstance(job, SampleJob):
            return replace(self, jobs=self.jobs + 1, prompt_tokens=prompt_tokens)
        return Load(
            self.jobs + 1,
            self.rows + job.params.n - job.num_started,
            max(self.longest, job.longest),
            prompt_tokens,
        )

    def fits(self, limits: Limits, bytes_per_token: float) -> bool:
        """Whether there is room even if every sample becomes as long as the longest may."""
        rows = min(self.rows, limits.max_running)
        tokens = rows * round_up(self.longest) + self.prompt_tokens
        return self.jobs <= limits.max_running and tokens * bytes_per_token <= limits.max_kv_bytes
