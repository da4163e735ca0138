"""The report of a measured run: collected step by step, written as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trinity.checkpoint.atomic import write_text
from trinity.common.errors import TrinityError
from trinity.launcher.summary import finite
from trinity.perf.sampler import Sample
from trinity.utils.metrics import Metrics

_KEYS = {"run_meta", "timing", "throughput", "resource_timeline", "step_metrics", "status"}
_FAILURES = {
    "tasks": "rollout/failed_task_count",
    "runs": "rollout/failed_run_count",
    "runs_too_slow": "rollout/timeout_run_count",
    "runs_lost": "rollout/lost_run_count",
    "runner_processes": "rollout/lost_runner_count",
    "samples_without_reward": "rollout/dropped_sample_count",
}
_STEP_S = "explorer/time/step"
_TOKENS = "rollout/response_tokens"
_SAMPLES = "rollout/experience_count"


class ReportError(TrinityError):
    """What should be a report is none."""

    exit_code = 2


@dataclass
class PerfReport:
    """Listens to a run and tells what it amounted to.

    Args:
        run_meta: What was run, and where.
        artifacts: Where the rest of it lies.
        started: `time.time` of its start.
        samples: Of machine and engines over time; filled by others, as ``engine_failures`` are.
    """

    run_meta: Mapping[str, object]
    artifacts: Mapping[str, str]
    started: float = field(default_factory=time.time)
    samples: Sequence[Sample] = ()
    engine_failures: Sequence[Sample] = ()
    state: str = "running"
    error: str | None = None
    steps: dict[int, Metrics] = field(default_factory=dict)
    _ended_at: dict[int, float] = field(default_factory=dict)

    def listen(self, role: str, step: int, metrics: Metrics) -> None:
        """Take in one report of the explorer, which tells of a step in two parts."""
        if role == "explorer":
            self.steps.setdefault(step, {}).update(metrics)
            self._ended_at[step] = time.time() - self.started

    @property
    def whole_steps(self) -> dict[int, Metrics]:
        """Metrics of the steps that came to their end."""
        return {step: metrics for step, metrics in self.steps.items() if _STEP_S in metrics}

    def as_dict(self) -> dict[str, object]:
        """The report, of the whole steps so far."""
        whole = self.whole_steps
        return {
            "run_meta": dict(self.run_meta),
            "status": {"state": self.state, "error": self.error},
            "timing": self._timing(whole),
            "throughput": throughput(list(whole.values())),
            "failures": self._failures(),
            "resource_timeline": list(self.samples),
            "step_metrics": [
                {"step": step, "ended_s": round(self._ended_at[step], 3), **metrics}
                for step, metrics in self.steps.items()
            ],
            "artifacts": dict(self.artifacts),
        }

    def write(self, path: Path) -> None:
        """Write it as JSON; numbers that JSON does not know become null."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(finite(self.as_dict()), indent=2, allow_nan=False) + "\n")

    def _timing(self, whole: Mapping[int, Metrics]) -> dict[str, object]:
        seconds = [metrics[_STEP_S] for metrics in whole.values()]
        first = next(iter(whole), None)
        return {
            "total_s": time.time() - self.started,
            "start_s": self._ended_at[first] - seconds[0] if first is not None else None,
            "steps": len(seconds),
            "step_s": seconds,
            "step_s_mean": sum(seconds) / len(seconds) if seconds else None,
            "step_s_max": max(seconds, default=None),
            "step_s_min": min(seconds, default=None),
        }

    def _failures(self) -> dict[str, object]:
        rows = self.steps.values()
        counts: dict[str, object] = {
            name: int(sum(row.get(key, 0) for row in rows)) for name, key in _FAILURES.items()
        }
        return counts | {"engines": list(self.engine_failures)}


def throughput(steps: Sequence[Metrics]) -> dict[str, object]:
    """Tokens and samples a second over whole steps, and how long prompts and replies were.

    The first step finds caches empty and kernels not compiled; ``*_later`` leave it out.
    """
    lengths: dict[str, object] = {}
    for name in ("prompt_length", "response_length"):
        key = f"rollout/{name}"
        rows = [step for step in steps if f"{key}/mean" in step]
        count = sum(row[_SAMPLES] for row in rows)
        total = sum(row[f"{key}/mean"] * row[_SAMPLES] for row in rows)
        lengths[name] = {
            "mean": total / count if count else None,
            "max": max((row[f"{key}/max"] for row in rows), default=None),
            "min": min((row[f"{key}/min"] for row in rows), default=None),
        }
    return {
        "response_tokens": int(sum(step.get(_TOKENS, 0) for step in steps)),
        "samples": int(sum(step.get(_SAMPLES, 0) for step in steps)),
        "tokens_per_second": _rate(steps, _TOKENS),
        "samples_per_second": _rate(steps, _SAMPLES),
        "tokens_per_second_later": _rate(steps[1:], _TOKENS),
        "samples_per_second_later": _rate(steps[1:], _SAMPLES),
        **lengths,
    }


def _rate(steps: Sequence[Metrics], key: str) -> float | None:
    seconds = sum(step[_STEP_S] for step in steps)
    return sum(step.get(key, 0) for step in steps) / seconds if seconds else None


def read_report(path: Path) -> dict[str, object]:
    """A report that `PerfReport.write` wrote.

    Raises:
        ReportError: There is none, or it is something else.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ReportError(
            f"There is no report {path} ({error.strerror}): `trinity perf run` writes one."
        ) from error
    except ValueError as error:
        raise ReportError(f"{path} is no report: {error}.") from error
    if not isinstance(found, dict) or not found.keys() >= _KEYS:
        raise ReportError(f"{path} is no report of `trinity perf run`.")
    return found
