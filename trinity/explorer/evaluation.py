"""Scores of an evaluation: mean and spread over tasks, best and worst of k runs."""

from collections.abc import Sequence

import numpy as np

from trinity.explorer.scheduler import TaskStatus
from trinity.utils.metrics import Metrics

_DRAWS = 1000
_SEED = 42


def summarize_eval(statuses: Sequence[TaskStatus], detailed: bool = False) -> Metrics:
    """Metrics of an evaluation set from the per-run metrics of its tasks.

    With n runs a task, each metric gives ``mean@n`` and ``std@n`` (over the runs of a task, then
    the mean over tasks) and, for n > 1, ``best@k`` and ``worst@k`` for k = 2, 4, ... and n: the
    expected best and worst of k runs, by bootstrap. Tasks that failed don't count.

    Args:
        statuses: One a task.
        detailed: Also ``mean``, ``max``, ``min`` and ``std`` over tasks.
    """
    scores: dict[str, list[list[float]]] = {}
    for status in statuses:
        for name in sorted({key for run in status.metrics for key in run}):
            runs = [float(run[name]) for run in status.metrics if name in run]
            scores.setdefault(name, []).append(runs)
    metrics: Metrics = {"finished_task_count": float(sum(s.ok for s in statuses))}
    for name, tasks in scores.items():
        metrics |= {f"{name}/{key}": value for key, value in _summary(tasks, detailed).items()}
    return metrics


def _summary(tasks: list[list[float]], detailed: bool) -> Metrics:
    n = max(len(runs) for runs in tasks)
    means = np.array([np.mean(runs) for runs in tasks])
    stds = np.array([np.std(runs) for runs in tasks])
    summary = {f"mean@{n}": float(means.mean()), f"std@{n}": float(stds.mean())}
    for k in _sizes(n):
        rng = np.random.default_rng(_SEED)
        picks = [np.array(runs)[rng.integers(0, len(runs), (_DRAWS, k))] for runs in tasks]
        summary[f"best@{k}"] = float(np.mean([draw.max(axis=1).mean() for draw in picks]))
        summary[f"worst@{k}"] = float(np.mean([draw.min(axis=1).mean() for draw in picks]))
    if detailed:
        summary |= {
            "mean": float(means.mean()),
            "max": float(means.max()),
            "min": float(means.min()),
            "std": float(means.std()),
        }
    return summary


def _sizes(n: int) -> list[int]:
    """2, 4, 8 ... below n, and n itself; nothing for a single run."""
    if n == 1:
        return []
    sizes = [2**power for power in range(1, n.bit_length()) if 2**power < n]
    return [*sizes, n]
