import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity.utils.metrics import joined, numbers, prefix_metrics, summarize
from trinity.utils.timer import timed


def test_prefix() -> None:
    assert prefix_metrics({"a": 1.0, "b/c": 2.0}, "x") == {"x/a": 1.0, "x/b/c": 2.0}


def test_three_summaries_by_default() -> None:
    assert summarize([{"a": 1}, {"a": 2.0}, {"a": 6}], "rollout") == {
        "rollout/a/mean": 3.0,
        "rollout/a/max": 6.0,
        "rollout/a/min": 1.0,
    }


@pytest.mark.parametrize(
    ("suffix", "value"), [("mean", 2.5), ("sum", 5.0), ("max", 4.0), ("min", 1.0), ("last", 4.0)]
)
def test_a_name_chooses_its_summary(suffix: str, value: float) -> None:
    assert summarize([{f"a:{suffix}": 1}, {f"a:{suffix}": 4}]) == {"a": value}


def test_other_colons_are_part_of_the_name() -> None:
    assert set(summarize([{"a:b": 1, ":sum": 1}])) == {
        f"{name}/{how}" for name in ("a:b", ":sum") for how in ("mean", "max", "min")
    }


def test_what_is_no_number_does_not_count() -> None:
    rows = [{"a": 1, "b": "x", "c": None}, {"a": math.nan}, {"a": math.inf}, {}]
    assert summarize(rows) == {"a/mean": 1.0, "a/max": 1.0, "a/min": 1.0}


def test_numbers_of_all_kinds() -> None:
    rows = [{"a": np.float32(1)}, {"a": np.int64(2)}, {"a": True}, {"a": np.float64(0)}]
    assert summarize(rows)["a/mean"] == 1.0


def test_numbers_among_other_things() -> None:
    found = {
        "float": np.float32(0.5),
        "int": np.int64(2),
        "bool": np.bool_(True),
        "tensor": torch.tensor(3.0),
        "text": np.str_("4"),
        "date": np.datetime64("2026-01-01"),
        "complex": torch.tensor(1j),
        "row": torch.tensor([1.0]),
        "none": None,
    }
    assert numbers(found) == {"float": 0.5, "int": 2.0, "bool": 1.0, "tensor": 3.0}


def test_rows_of_one_run_are_joined_as_their_names_say() -> None:
    rows = [{"calls:sum": 2.0, "depth:max": 1.0, "a": 1.0}, {"calls:sum": 3.0, "depth:max": 4.0}]
    assert joined(rows) == {"calls:sum": 5.0, "depth:max": 4.0, "a": 1.0}


def test_no_rows() -> None:
    assert summarize([]) == {}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_order(values: list[float]) -> None:
    found = summarize([{"a": value} for value in values])
    assert found["a/min"] <= found["a/mean"] + 1e-9 and found["a/mean"] <= found["a/max"] + 1e-9
    assert found["a/mean"] == pytest.approx(sum(values) / len(values), abs=1e-6)


def test_timed_adds_up_also_on_errors() -> None:
    metrics: dict[str, float] = {}
    with timed(metrics, "t"):
        pass
    first = metrics["t"]
    with pytest.raises(KeyError), timed(metrics, "t"):
        raise KeyError
    assert 0 <= first < metrics["t"] < 1
