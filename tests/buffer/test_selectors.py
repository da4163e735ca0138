"""Index sequences as the reference (section 7.2) gives them."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.buffer.rows import DataError, ListRows
from trinity.buffer.rows.check import RowFault
from trinity.buffer.selected import SelectedRows
from trinity.buffer.selector import SELECTORS, BaseSelector, DataSource
from trinity.common.config.buffer import DataSelectorConfig
from trinity.common.constants import OnBadRow


def selector(kind: str, size: int = 10, rows: list | None = None, **config) -> BaseSelector:
    source = DataSource(ListRows(rows or [{"i": i} for i in range(size)]))
    section = DataSelectorConfig(selector_type=kind, **config)
    return SELECTORS.get(kind)(source, section)


def test_sequential_wraps():
    chosen = selector("sequential", 5)
    assert [chosen.get_indices(3) for _ in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_shuffle_is_a_pcg64_permutation_an_epoch():
    chosen = selector("shuffle", 7, seed=3)
    expected = [
        int(i)
        for epoch in range(3)
        for i in np.random.Generator(np.random.PCG64(3 + epoch)).permutation(7)
    ]
    found = list(itertools.chain(*(chosen.get_indices(3) for _ in range(7))))
    assert found == expected
    assert sorted(found[:7]) == list(range(7))


def test_random_draws_each_batch_by_its_position():
    chosen = selector("random", 20, seed=9)
    for start in (0, 4, 8):
        expected = np.random.default_rng(9 + start).choice(20, 4, replace=False).tolist()
        assert chosen.get_indices(4) == expected


def test_random_takes_more_than_there_is():
    assert len(selector("random", 3).get_indices(8)) == 8


def test_easy_to_hard_sorts_by_features_then_by_index_descending():
    rows = [{"rate": r, "n": n} for r, n in [(0.5, 1), (0.9, 1), (0.5, 2), (0.5, 1)]]
    chosen = selector("offline_easy2hard", rows=rows, feature_keys=["rate", "n"])
    assert chosen.get_indices(6) == [1, 2, 3, 0, 1, 2]


def test_easy_to_hard_needs_its_columns():
    with pytest.raises(DataError, match="feature_keys"):
        selector("offline_easy2hard").get_indices(1)
    with pytest.raises(DataError, match="'rate', which a row lacks; it has: i"):
        selector("offline_easy2hard", feature_keys=["rate"]).get_indices(1)


ANCHORS = [{"low": 0.1 * i, "high": min(1.0, 0.1 * i + 0.3)} for i in range(8)]


def difficulty(**kwargs) -> BaseSelector:
    return selector(
        "difficulty_based", rows=ANCHORS, feature_keys=["low", "high"], seed=1, kwargs=kwargs
    )


@pytest.mark.parametrize("value", [None, "a half", float("nan")])
def test_difficulty_needs_a_pass_rate_in_every_row(value):
    rows = [{"low": 0.1, "high": 0.5}, {"low": 0.1, "high": value}]
    with pytest.raises(DataError, match=r"'high', which is .* in row 1"):
        selector("difficulty_based", rows=rows, feature_keys=["low", "high"])


def test_a_cold_choice_of_more_tasks_than_are_near_the_target():
    chosen = difficulty(tau=1e-3)
    for _ in range(10):
        chosen.feedback(range(8), [1.0] * 2 + [0.0] * 6)
    assert set(chosen.get_indices(2)) == {0, 1}
    assert sorted(chosen.get_indices(8)) == list(range(8))


def test_difficulty_starts_from_even_beliefs():
    assert difficulty(tau=0).get_indices(3) == [0, 1, 2]
    chosen = difficulty(tau=1.0)
    scores = np.full(8, -0.5)
    weights = np.exp(scores - scores.max())
    expected = np.random.default_rng(1).choice(8, 3, replace=False, p=weights / weights.sum())
    assert chosen.get_indices(3) == expected.tolist()


def test_difficulty_feedback_follows_the_formulas():
    chosen = difficulty(tau=0, m=16, lamb=0.2, rho=0.2)
    chosen.feedback([1, 3], [0.5, 0.25])
    low = np.array([row["low"] for row in ANCHORS])
    high = np.array([row["high"] for row in ANCHORS])
    seen = [1, 3]
    capability = (0.375 - low[seen].mean()) / (high[seen].mean() - low[seen].mean() + 1e-6)
    predicted = np.clip((high - low) * capability + low, 0, 1)
    predicted[seen] = [0.5, 0.25]
    success, failure = np.zeros(8), np.zeros(8)
    success[seen], failure[seen] = [8, 4], [8, 12]
    alpha = 0.8 * 1 + 0.2 + 0.8 * success + 0.2 * predicted * 16
    beta = 0.8 * 1 + 0.2 + 0.8 * failure + 0.2 * (1 - predicted) * 16
    state = chosen.state_dict()
    np.testing.assert_allclose(state["alpha"], alpha)
    np.testing.assert_allclose(state["beta"], beta)
    order = np.argsort(-(-np.abs(1.0 - alpha / (alpha + beta))), kind="stable")
    assert chosen.get_indices(3) == order[:3].tolist()


def test_capability_moves_slowly():
    chosen = difficulty()
    chosen.feedback([2], [0.2])
    first = chosen.metrics()["capability"]
    chosen.feedback([2], [0.5])
    now = (0.5 - 0.2) / (0.5 - 0.2 + 1e-6)
    assert chosen.metrics()["capability"] == pytest.approx(0.9 * first + 0.1 * now)


def test_difficulty_comes_back_as_it_was():
    first = difficulty(tau=0)
    first.get_indices(2)
    first.feedback([0, 1], [1.0, 0.5])
    again = difficulty(tau=0)
    again.load_state_dict(first.state_dict())
    assert again.get_indices(8) == first.get_indices(8)


def test_difficulty_refuses_other_data_and_unknown_arguments():
    state = difficulty().state_dict()
    state["alpha"], state["beta"] = state["alpha"][:-1], state["beta"][:-1]
    with pytest.raises(DataError, match="7 tasks, but the data set has 8"):
        difficulty().load_state_dict(state)
    with pytest.raises(DataError, match="'taw'"):
        difficulty(taw=1)


@pytest.mark.parametrize("kind", ["sequential", "shuffle", "random"])
@given(batches=st.lists(st.integers(1, 9), min_size=1, max_size=6), cut=st.integers(0, 6))
def test_a_resume_goes_on_with_the_same_rows(kind: str, batches: list[int], cut: int):
    unbroken = selector(kind, 7)
    expected = [unbroken.get_indices(size) for size in batches]
    first = selector(kind, 7)
    found = [first.get_indices(size) for size in batches[:cut]]
    second = selector(kind, 7)
    second.load_state_dict(first.state_dict())
    assert found + [second.get_indices(size) for size in batches[cut:]] == expected


@pytest.mark.parametrize("seen", [-0.1, -5.0, 1.1, float("nan")])
def test_rewards_that_are_no_pass_rates_do_not_break_a_belief(seen: float):
    rows = [{"low": 0.1, "high": 0.9} for _ in range(4)]
    chosen = selector(
        "difficulty_based", rows=rows, feature_keys=["low", "high"], kwargs={"do_sample": True}
    )
    for _ in range(5):
        indices = chosen.get_indices(2)
        chosen.feedback(indices, [seen, 0.5])
    assert all(
        0 < value < np.inf for key in ("alpha", "beta") for value in chosen.state_dict()[key]
    )


def test_a_row_that_always_comes_and_can_not_be_used_is_no_endless_loop():
    class Worst(BaseSelector):
        def get_indices(self, batch_size, return_extra_info=False):
            return list(range(batch_size))

    def form(row, index):
        if index == 0:
            raise RowFault("i", "too long")
        return index

    source = ListRows([{"i": i} for i in range(4)])
    selector_ = Worst(DataSource(source), DataSelectorConfig())
    rows = SelectedRows(source, form, selector_, name="the data set", on_bad_row=OnBadRow.SKIP)
    with pytest.raises(DataError, match="can be used"):
        rows.take(2)
