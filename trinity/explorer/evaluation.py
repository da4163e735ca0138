"""Scores of an evaluation: mean and spread over tasks, best and worst of k runs."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trinity.explorer.scheduler import TaskStatus
from trinity.utils.metrics import Metrics, own_summary

Scores = NDArray[np.float64]


def summarize_eval(statuses: Sequence[TaskStatus], detailed: bool = False) -> Metrics:
    """Metrics of an evaluation set from the per-run metrics of its tasks.

    With n runs a task, each metric gives ``mean@n`` and ``std@n`` (over the runs of a task, then
    the mean over tasks) and, for n > 1, ``best@k`` and ``worst@k`` for k = 2, 4, ... and n: the
    expected best and worst of k runs drawn with replacement, exactly. Runs that failed don't
    count, nor values that are not finite.

    Args:
        statuses: One a task.
        detailed: Also ``mean``, ``max``, ``min`` and ``std`` over tasks.
    """
    scores: dict[str, list[Scores]] = {}
    for status in statuses:
        for name in sorted({key for run in status.metrics for key in run}):
            runs = [float(run[name]) for run in status.metrics if name in run]
            finite = [value for value in runs if math.isfinite(value)]
            if finite:
                scores.setdefault(name, []).append(np.sort(finite))
    metrics: Metrics = {"finished_task_count": float(sum(s.ok for s in statuses))}
    for whole_name, tasks in scores.items():
        name, _ = own_summary(whole_name)
        metrics |= {f"{name}/{key}": value for key, value in _summary(tasks, detailed).items()}
    return metrics


def _summary(tasks: list[Scores], detailed: bool) -> Metrics:
    n = max(len(runs) for runs in tasks)
    means = np.array([runs.mean() for runs in tasks])
    stds = np.array([runs.std() for runs in tasks])
    summary = {f"mean@{n}": float(means.mean()), f"std@{n}": float(stds.mean())}
    for k in _sizes(n):
        summary[f"best@{k}"] = float(np.mean([_expected_best(runs, k) for runs in tasks]))
        worst = np.mean([_expected_best(-runs[::-1], k) for runs in tasks])
        summary[f"worst@{k}"] = 0.0 - float(worst)  # not -0.0, which logs and pages would show
    if detailed:
        summary |= {
            "mean": float(means.mean()),
            "max": float(means.max()),
            "min": float(means.min()),
            "std": float(means.std()),
        }
    return summary


def _expected_best(ascending: Scores, k: int) -> float:
    """Expected maximum of k draws with replacement.

    The i-th lowest of n is the maximum with probability ``(i / n)^k - ((i - 1) / n)^k``.
    """
    reached = (np.arange(len(ascending) + 1) / len(ascending)) ** k
    return float(ascending @ np.diff(reached))


def _sizes(n: int) -> list[int]:
    """2, 4, 8 ... below n, and n itself; nothing for a single run."""
    if n == 1:
        return []
    sizes = [2**power for power in range(1, n.bit_length()) if 2**power < n]
    return [*sizes, n]
