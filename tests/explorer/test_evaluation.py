import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.common.workflows import Task
from trinity.explorer.evaluation import summarize_eval
from trinity.explorer.scheduler import TaskStatus


def status(*runs: dict[str, float], ok: bool = True) -> TaskStatus:
    return TaskStatus(0, ok, 1, 1.0, "", list(runs), Task())


def scored(*tasks: list[float]) -> list[TaskStatus]:
    return [status(*({"score": value} for value in task)) for task in tasks]


def test_a_worst_of_nothing_is_no_negative_zero() -> None:
    assert math.copysign(1, summarize_eval(scored([0.0, 0.0]))["score/worst@2"]) == 1


def test_one_run_a_task() -> None:
    assert summarize_eval(scored([1.0], [0.0])) == {
        "finished_task_count": 2.0,
        "score/mean@1": 0.5,
        "score/std@1": 0.0,
    }


def test_two_runs_a_task() -> None:
    found = summarize_eval(scored([0.0, 1.0], [1.0, 1.0]))
    assert found == {
        "finished_task_count": 2.0,
        "score/mean@2": 0.75,
        "score/std@2": 0.25,
        "score/best@2": pytest.approx((0.75 + 1) / 2),
        "score/worst@2": pytest.approx((0.25 + 1) / 2),
    }


@pytest.mark.parametrize(
    ("n", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8])]
)
def test_sizes_of_best_and_worst(n: int, sizes: list[int]) -> None:
    found = summarize_eval(scored([1.0] * n))
    assert [k for k in range(1, 9) if f"score/best@{k}" in found] == sizes
    assert all(found[f"score/worst@{k}"] == pytest.approx(1.0) for k in sizes)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=4))
def test_best_and_worst_are_the_means_over_all_draws(values: list[float]) -> None:
    n = len(values)
    found = summarize_eval(scored(values))
    for k in {2, n}:
        draws = list(itertools.product(values, repeat=k))
        assert found[f"score/best@{k}"] == pytest.approx(np.mean([max(d) for d in draws]))
        assert found[f"score/worst@{k}"] == pytest.approx(np.mean([min(d) for d in draws]))


def test_details() -> None:
    found = summarize_eval(scored([0.0], [1.0], [2.0]), detailed=True)
    assert found["score/mean"] == 1.0
    assert (found["score/min"], found["score/max"]) == (0.0, 2.0)
    assert found["score/std"] == pytest.approx(math.sqrt(2 / 3))


def test_failed_runs_and_tasks_do_not_count() -> None:
    statuses = [
        status({"score": 1.0}, {"score": 0.0}),
        status({"score": 1.0}, ok=False),
        status(ok=False),
    ]
    found = summarize_eval(statuses)
    assert found["finished_task_count"] == 1.0
    assert found["score/mean@2"] == 0.75


def test_values_that_are_not_finite_do_not_count() -> None:
    found = summarize_eval([status({"score": 1.0, "x": math.nan}, {"score": math.inf})])
    assert found["score/mean@1"] == 1.0
    assert not any(name.startswith("x/") for name in found)


def test_metrics_of_some_runs_only() -> None:
    found = summarize_eval([status({"a": 1.0}, {"b": 3.0}), status({"a": 0.0})])
    assert found["a/mean@1"] == 0.5 and found["b/mean@1"] == 3.0


def test_nothing_to_summarize() -> None:
    assert summarize_eval([]) == {"finished_task_count": 0.0}


def test_what_a_name_says_of_its_summary_is_no_part_of_it() -> None:
    found = summarize_eval([status({"calls:sum": 2.0}, {"calls:sum": 4.0})])
    assert (found["calls/mean@2"], found["calls/best@2"]) == (3.0, pytest.approx(3.5))
    assert not any(":" in name for name in found)
