"""What a run amounted to: collected from the reports of its parts, kept in ``summary.json``."""

import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trinity.checkpoint.atomic import write_text
from trinity.utils.metrics import Metrics

_LAST = 5


@dataclass
class StageSummary:
    """Figures of one stage. Times in seconds, memory in MB (2**20 bytes).

    Args:
        algorithm: None if nothing is trained and nothing written to train on.
        seconds_to_first_step: From the start of the process to the end of the first step.
        step_seconds: Of the trainer's steps; of the explorer's where it is alone.
        seconds_training: All of them; rates are those of this time.
    """

    name: str
    algorithm: str | None
    mode: str
    steps: int = 0
    seconds: float = 0.0
    seconds_to_first_step: float | None = None
    seconds_training: float = 0.0
    samples: int = 0
    tokens: int = 0
    samples_per_second: float = 0.0
    tokens_per_second: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    reward_first: float | None = None
    reward_last_5: float | None = None
    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    evals: dict[str, dict[str, float]] = field(default_factory=dict)
    eval_before: dict[str, float] = field(default_factory=dict)
    eval_after: dict[str, float] = field(default_factory=dict)
    max_ratio_deviation: float | None = None
    failed_tasks: int = 0
    huggingface: str | None = None
    is_skipped: bool = False


@dataclass
class RunSummary:
    """The figures of a whole run, stage by stage."""

    project: str
    name: str
    job_folder: str
    stages: list[StageSummary] = field(default_factory=list)
    seconds: float = 0.0
    peak_memory_mb: float = 0.0
    status: str = "running"
    error: str | None = None

    @property
    def seconds_starting(self) -> float:
        """From the start of the process to the begin of the first step; 0 without a step."""
        for stage in self.stages:
            if stage.seconds_to_first_step is not None:
                return stage.seconds_to_first_step - stage.step_seconds[0]
        return 0.0

    def write(self, folder: Path) -> None:
        """``<folder>/summary.json``; numbers that JSON does not know (NaN) become null."""
        text = json.dumps(finite(asdict(self)), indent=2, allow_nan=False)
        write_text(folder / "summary.json", text + "\n")


def finite(value: object) -> object:
    """``value`` with null for each number in it that JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class StageRecorder:
    """Listens to the reports of one stage and keeps its figures up to date."""

    def __init__(self, summary: StageSummary, process_started: float) -> None:
        self.summary = summary
        self._process_started = process_started
        self._started = time.time()

    def report(self, role: str, step: int, metrics: Metrics) -> None:
        """Take in one report of ``explorer``, ``trainer``, ``eval`` or ``bench``."""
        {"explorer": self._explorer, "trainer": self._trainer}.get(role, self._eval)(step, metrics)
        self.summary.seconds = time.time() - self._started
        if self._ends_step(role, metrics) or not self._is_alone:
            self._update_rates()

    def end(self) -> None:
        """The stage is over, its last save included, whatever it came to."""
        self.summary.seconds = time.time() - self._started

    def _explorer(self, step: int, metrics: Metrics) -> None:
        summary = self.summary
        if "rollout/reward/mean" in metrics:
            summary.rewards.append(metrics["rollout/reward/mean"])
            summary.reward_first = summary.rewards[0]
            last = summary.rewards[-_LAST:]
            summary.reward_last_5 = sum(last) / len(last)
        summary.samples += int(metrics.get("rollout/experience_count", 0))
        summary.tokens += int(metrics.get("rollout/response_tokens", 0))
        summary.failed_tasks += int(metrics.get("rollout/failed_task_count", 0))
        if self._is_alone:
            summary.steps = step

    def _trainer(self, step: int, metrics: Metrics) -> None:
        summary = self.summary
        summary.steps = step
        if "actor/final_loss" in metrics:
            summary.losses.append(metrics["actor/final_loss"])
        if summary.mode == "train":
            summary.samples += int(metrics.get("sample/experience_count", 0))
            summary.tokens += int(metrics.get("sample/trained_tokens", 0))
        deviation = metrics.get("actor/first_ratio_max_deviation")
        if deviation is not None:
            summary.max_ratio_deviation = max(summary.max_ratio_deviation or 0.0, deviation)

    def _eval(self, step: int, metrics: Metrics) -> None:
        scores = {k: v for k, v in metrics.items() if not k.startswith("time/")}
        self.summary.evals[str(step)] = scores
        if not self.summary.eval_before:
            self.summary.eval_before = scores
        self.summary.eval_after = scores

    @property
    def _is_alone(self) -> bool:
        """Whether there is an explorer and no trainer."""
        return self.summary.mode == "explore"

    def _ends_step(self, role: str, metrics: Metrics) -> bool:
        """Take in how long a step took, if this is the report that ends one."""
        seconds = step_seconds(role, self.summary.mode, metrics)
        if seconds is None:
            return False
        self.summary.step_seconds.append(seconds)
        if self.summary.seconds_to_first_step is None:
            self.summary.seconds_to_first_step = time.time() - self._process_started
        return True

    def _update_rates(self) -> None:
        summary = self.summary
        spent = sum(summary.step_seconds) or summary.seconds
        summary.seconds_training = spent
        summary.samples_per_second = summary.samples / max(spent, 1e-9)
        summary.tokens_per_second = summary.tokens / max(spent, 1e-9)


def step_seconds(role: str, mode: str, metrics: Metrics) -> float | None:
    """How long a step of the stage took; None if this report of ``role`` does not end one."""
    if role == "trainer":
        return metrics.get("time/step", 0.0)
    if role == "explorer" and mode == "explore":  # its reports of a step are two
        return metrics.get("explorer/time/step")
    return None


def main_score(scores: dict[str, float]) -> tuple[str, float] | None:
    """The figure of an evaluation that people look at: accuracy if there is one, else reward."""
    means = {name: value for name, value in scores.items() if "/mean@" in name}
    for wanted in ("accuracy", "reward", "score"):
        for name, value in means.items():
            if name.rpartition("/")[0].endswith(f"/{wanted}"):
                return name, value
    return next(iter(means.items()), None)
