import pytest
import torch

from trinity.algorithm.utils import (
    log_ratio,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    prefix_metrics,
    visible,
)

VALUES = torch.tensor([[1.0, 2.0, float("nan")], [6.0, float("inf"), float("nan")]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def test_sum_mean_and_variance_by_hand():
    assert float(masked_sum(VALUES, MASK)) == 9
    assert masked_sum(VALUES, MASK, axis=1).tolist() == [3, 6]
    assert float(masked_mean(VALUES, MASK)) == 3
    assert masked_mean(VALUES, MASK, axis=1).tolist() == [1.5, 6]
    assert float(masked_var(VALUES, MASK)) == pytest.approx((4 + 1 + 9) / 2)
    assert float(masked_var(VALUES, MASK, unbiased=False)) == pytest.approx(14 / 3)


def test_nothing_masked_in_gives_zero():
    nothing = torch.zeros_like(MASK)
    assert float(masked_mean(VALUES, nothing)) == 0
    assert float(masked_var(VALUES, nothing)) == 0
    assert masked_whiten(VALUES, nothing).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_whitening_by_hand():
    white = masked_whiten(VALUES, MASK)
    assert white[0].tolist() == pytest.approx([-2 / 7**0.5, -1 / 7**0.5, 0])
    assert float(white[1, 0]) == pytest.approx(3 / 7**0.5)
    moved = masked_whiten(VALUES, MASK, shift_mean=False)
    assert float(moved[1, 0]) == pytest.approx(3 + 3 / 7**0.5)


def test_whitening_equal_numbers_of_any_size_gives_zero():
    values = torch.full((4, 5), 1e6) + 0.1
    assert masked_whiten(values, torch.ones(4, 5)).abs().max() < 1e-3


def test_whitening_one_token_gives_zero():
    assert float(masked_whiten(torch.tensor([[5.0]]), torch.tensor([[1]]))) == 0


def test_log_ratio_is_cut_on_both_sides():
    ratio = log_ratio(torch.tensor([-1.0, 100.0, -100.0]), torch.zeros(3))
    assert ratio.tolist() == [-1, 20, -20]


def test_visible_hides_garbage_from_value_and_gradient():
    values = VALUES.clone().requires_grad_()
    [clean] = visible(MASK, values)
    assert clean.tolist() == [[1, 2, 0], [6, 0, 0]]
    clean.exp().sum().backward()
    assert values.grad.isfinite().all()


def test_prefix():
    assert prefix_metrics({"a": 1.0}, "usual") == {"usual/a": 1.0}
