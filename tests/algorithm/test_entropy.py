import pytest
import torch

from trinity.algorithm import ENTROPY_LOSS_FN

ENTROPY = torch.tensor([[1.0, 3.0], [5.0, float("nan")]])
MASK = torch.tensor([[1, 1], [1, 0]]).bool()


def test_default_bonus_by_hand():
    bonus, metrics = ENTROPY_LOSS_FN.get("default")(entropy_coef=0.1)(ENTROPY, MASK)
    assert bonus.item() == pytest.approx(0.3)
    assert metrics["entropy_loss"].item() == pytest.approx(3)
    by_row, _ = ENTROPY_LOSS_FN.get("default")(entropy_coef=0.1)(
        ENTROPY, MASK, loss_agg_mode="seq-mean-token-mean"
    )
    assert by_row.item() == pytest.approx(0.35)


def test_default_coefficient_only_reports():
    bonus, metrics = ENTROPY_LOSS_FN.get("default")()(ENTROPY, MASK)
    assert bonus.item() == 0
    assert metrics["entropy_loss"].item() == pytest.approx(3)


def test_mix_leaves_expert_rows_out():
    bonus, metrics = ENTROPY_LOSS_FN.get("mix")(entropy_coef=0.1)(
        ENTROPY, MASK, torch.tensor([False, True])
    )
    assert bonus.item() == pytest.approx(0.2)
    assert metrics["entropy_loss"].item() == pytest.approx(2)


def test_none_asks_for_no_entropy():
    fn = ENTROPY_LOSS_FN.get("none")()
    assert not fn.needs_entropy
    assert fn.inputs() == ["logprob"]
    bonus, metrics = fn(ENTROPY)
    assert (bonus.item(), metrics) == (0, {})
