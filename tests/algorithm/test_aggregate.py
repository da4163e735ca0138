import math

import pytest
import torch

from trinity.algorithm.aggregate import (
    Counts,
    LossScope,
    aggregate_loss,
    as_metric,
    complete_pairs,
    current_scope,
    loss_scope,
    mean_metric,
)
from trinity.common.config.algorithm import LOSS_AGG_MODES

VALUES = torch.tensor([[1.0, 2.0, 3.0, 9.0], [4.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
BY_HAND = {
    "token-mean": 10 / 4,
    "seq-mean-token-sum": 10 / 2,
    "seq-mean-token-mean": (2 + 4) / 2,
    "seq-mean-token-sum-norm": 10 / 3,
}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_each_mode_by_hand(mode):
    assert float(aggregate_loss(VALUES, MASK, mode)) == pytest.approx(BY_HAND[mode])


def test_normalizer_replaces_the_horizon():
    loss = aggregate_loss(VALUES, MASK, "seq-mean-token-sum-norm", normalizer=8)
    assert float(loss) == pytest.approx(10 / 8)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_shares_of_a_scope_add_up(mode):
    with loss_scope(LossScope.of(MASK)):
        shares = [aggregate_loss(VALUES[i : i + 1], MASK[i : i + 1], mode) for i in range(3)]
    assert float(sum(shares)) == pytest.approx(BY_HAND[mode])
    assert float(shares[2]) == 0.0


def test_a_scope_ends_with_its_block_and_nests():
    outer, inner = LossScope.of(MASK), LossScope.of(MASK[:1])
    with loss_scope(outer):
        with loss_scope(inner):
            assert current_scope() is inner
        assert current_scope() is outer
    assert current_scope() is None


def test_scope_counts_parts_pairs_and_horizon():
    scope = LossScope.of(
        MASK, expert_mask=torch.tensor([1, 0, 1]).bool(), pair_id=torch.tensor([7, 7, 8])
    )
    assert scope.counts["all"] == Counts(tokens=4, rows=2)
    assert scope.counts["expert"] == Counts(3, 1)
    assert scope.counts["usual"] == Counts(1, 1)
    assert scope.counts["pairs"] == Counts(4, 1)
    assert scope.horizon == 3
    assert Counts(1, 2) + Counts(3, 4) == Counts(4, 6)


def test_a_pair_with_an_empty_answer_is_not_complete():
    pair_id = torch.tensor([1, 2, 1])
    mask = torch.tensor([[1], [1], [0]]).bool()
    assert complete_pairs(pair_id, mask).tolist() == [False, False, False]


def test_masked_values_are_never_read():
    values = VALUES.masked_fill(~MASK, float("nan")).requires_grad_()
    loss = aggregate_loss(values, MASK)
    loss.backward()
    assert loss.item() == pytest.approx(2.5)
    assert values.grad.isfinite().all()


def test_an_unknown_mode_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'token-sum'.*token-mean"):
        aggregate_loss(VALUES, MASK, "token-sum")


def test_a_batch_of_masked_rows_has_no_loss():
    with pytest.raises(ValueError, match="skip it"):
        aggregate_loss(VALUES, torch.zeros_like(MASK))


def test_a_masked_micro_batch_of_a_live_step_adds_nothing():
    with loss_scope(LossScope.of(MASK)):
        assert float(aggregate_loss(VALUES, torch.zeros_like(MASK))) == 0.0


def test_a_part_that_was_not_counted_is_refused():
    with loss_scope(LossScope.of(MASK)), pytest.raises(ValueError, match=r"'expert'.*expert_mask"):
        aggregate_loss(VALUES, MASK, part="expert")


def test_metrics_average_to_the_number_of_the_whole_step():
    pieces = [slice(0, 1), slice(1, 3)]
    tokens = [3, 1]
    with loss_scope(LossScope.of(MASK)):
        shares = [
            as_metric(aggregate_loss(VALUES[p], MASK[p], "seq-mean-token-mean"), MASK[p])
            for p in pieces
        ]
        means = [mean_metric(VALUES[p], MASK[p]) for p in pieces]
    average = [sum(float(m) * n for m, n in zip(ms, tokens)) / 4 for ms in (shares, means)]
    assert average == pytest.approx([3.0, 2.5])
    assert float(means[0]) == pytest.approx(2.0)


def test_a_metric_of_a_masked_micro_batch_is_zero():
    with loss_scope(LossScope.of(MASK)):
        assert float(as_metric(torch.tensor(0.0), MASK[2:])) == 0.0
    assert not math.isnan(float(as_metric(torch.tensor(0.0), MASK[2:])))
