import pytest
import torch

from trinity.algorithm.value_loss import value_loss


def test_value_loss_by_hand():
    values = torch.tensor([[2.0, 0.0, 0.0, 7.0]], requires_grad=True)
    old_values = torch.tensor([[1.0, 0.0, 0.0, 7.0]])
    returns = torch.tensor([[3.0, 1.0, 1.0, float("nan")]])
    mask = torch.tensor([[1, 1, 1, 0]]).bool()
    loss, metrics = value_loss(values, old_values, returns, mask, cliprange_value=0.5)
    # token 0: clipped to 1.5, (1.5 - 3)^2 = 2.25 > 1; tokens 1 and 2: 1
    assert loss.item() == pytest.approx(0.5 * (2.25 + 1 + 1) / 3)
    loss.backward()
    assert values.grad.tolist() == [[0, pytest.approx(-1 / 3), pytest.approx(-1 / 3), 0]]
    assert metrics["vf_clipfrac"].item() == pytest.approx(1 / 3)
    assert metrics["vpred_mean"].item() == pytest.approx(2 / 3)
    assert metrics["vf_loss"].item() == pytest.approx(loss.item())
