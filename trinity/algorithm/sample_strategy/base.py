"""How the trainer's batches are read from the buffers.

A strategy is given open readers; where they read from is none of its concern.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trinity.algorithm.base import Method
from trinity.common.config.check_arguments import COLLABORATORS
from trinity.common.experience import Experience

Metrics = dict[str, float]
Sample = tuple[list[Experience], Metrics, list[dict[str, Any]]]


class ExperienceSource(Protocol):
    """What a strategy calls of a reader. The data's end is `StopAsyncIteration`."""

    async def read(self, batch_size: int | None = None, **kwargs: Any) -> list[Experience]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SampleStrategy(Method, ABC):
    """Reads the batch of a trainer step.

    Args:
        reader: The experience buffer.
        batch_size: Experiences of a step (``buffer.train_batch_size``).
        auxiliary: Readers of ``buffer.trainer_input.auxiliary_buffers``, by name.

    Settings from ``sample_strategy_args`` come by keyword.
    """

    def __init__(
        self,
        reader: ExperienceSource,
        batch_size: int,
        auxiliary: Mapping[str, ExperienceSource] | None = None,
    ) -> None:
        self.reader = reader
        self.batch_size = batch_size
        self.auxiliary = dict(auxiliary or {})

    @classmethod
    def default_args(cls) -> dict[str, object]:
        return {k: v for k, v in super().default_args().items() if k not in COLLABORATORS}

    async def sample(self, step: int) -> Sample:
        """The experiences of trainer step ``step``, metrics, and a few rows for people to read.

        Raises:
            StopAsyncIteration: The data has ended.
        """
        start = time.monotonic()
        exps, metrics = await self.read(step)
        metrics["time/read_experience"] = time.monotonic() - start
        return exps, metrics | describe(exps, step), representatives(exps)

    @abstractmethod
    async def read(self, step: int) -> tuple[list[Experience], Metrics]:
        """The experiences of trainer step ``step``, and metrics of the strategy's own."""

    def state_dict(self) -> dict[str, Any]:
        """Where the readers stand."""
        return self.reader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reader.load_state_dict(state)


def oldest_version(experience: Experience) -> int | None:
    """Version of the weights that sampled its oldest trained token; None if nobody recorded one."""
    if experience.token_versions is not None and experience.action_mask is not None:
        versions = experience.token_versions[experience.action_mask]
        if len(versions):
            return int(versions.min())
    version = experience.info.get("model_version")
    return version if isinstance(version, int) else None


def describe(exps: Sequence[Experience], step: int) -> Metrics:
    """How many tasks a batch covers, and how many versions its tokens are behind step ``step``.

    The weights that step s starts from are version s - 1: in step with them the drift is 0.
    """
    metrics: Metrics = {"sample/task_count": float(len({e.eid.tid for e in exps}))}
    versions = [v for v in map(oldest_version, exps) if v is not None]
    for name, values in (
        ("sample/model_version", versions),
        ("sample/model_version_drift", [step - 1 - version for version in versions]),
    ):
        if values:
            metrics[f"{name}/mean"] = sum(values) / len(values)
            metrics[f"{name}/max"] = float(max(values))
            metrics[f"{name}/min"] = float(min(values))
    return metrics


def representatives(exps: Sequence[Experience]) -> list[dict[str, Any]]:
    """The experiences of highest and lowest reward, as rows of a table."""
    scored = [e for e in exps if e.reward is not None]
    if not scored:
        return []
    best = max(scored, key=lambda e: e.reward or 0.0)
    worst = min(scored, key=lambda e: e.reward or 0.0)
    return [
        {"reward": e.reward, "prompt": e.prompt_text or "", "response": e.response_text or ""}
        for e in ([best] if best is worst else [best, worst])
    ]
