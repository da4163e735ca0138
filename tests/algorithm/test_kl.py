import math

import pytest
import torch

from trinity.algorithm import KL_FN

LOGPROB = torch.tensor([[-1.0, -2.0, -5.0]], requires_grad=True)
REF = torch.tensor([[-3.0, -1.0, float("nan")]])
OLD = torch.tensor([[-2.0, -1.0, float("nan")]])
MASK = torch.tensor([[1, 1, 0]]).bool()
K3 = (math.exp(-2) - 1 + 2, math.exp(1) - 1 - 1)

BY_HAND = {
    "k1": (2 - 1) / 2,
    "k2": (2 + 0.5) / 2,
    "k3": sum(K3) / 2,
    "low_var_kl": sum(K3) / 2,
    "abs": 1.5,
    "corrected_k3": (2 * K3[0] + math.exp(-1) * K3[1]) / 2,  # exp(1) is cut to 2
}


@pytest.mark.parametrize("name", BY_HAND)
def test_estimators_by_hand(name):
    loss, metrics = KL_FN.get(name)(kl_coef=0.1).calculate_kl_loss(
        LOGPROB, REF, MASK, old_logprob=OLD
    )
    assert loss.item() == pytest.approx(0.1 * BY_HAND[name])
    assert metrics["kl_loss"].item() == pytest.approx(BY_HAND[name])
    assert metrics["kl_coef"].item() == pytest.approx(0.1)


def test_none_needs_no_reference_and_costs_nothing():
    kl = KL_FN.get("none")()
    assert not kl.needs_reference
    loss, metrics = kl.calculate_kl_loss(LOGPROB, None, MASK)
    assert (loss.item(), metrics) == (0, {})
    scores = torch.ones(1, 3)
    assert kl.apply_kl_penalty_to_reward(scores, None, None, MASK) == (scores, {})


def test_low_var_kl_is_cut_at_ten():
    kl = KL_FN.get("low_var_kl")()
    assert kl.calculate_kl(torch.tensor([-9.0]), torch.tensor([0.0])).item() == 10


def test_corrected_k3_needs_the_old_policy():
    with pytest.raises(ValueError, match="old_logprob"):
        KL_FN.get("corrected_k3")().calculate_kl(LOGPROB, REF)


def test_corrected_k3_has_the_gradient_of_the_kl():
    """On policy and with weights below 2, its expected gradient is that of KL(p || q)."""
    logits = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    q = torch.tensor([0.5, 0.2, 0.3])
    old = logits.detach().log_softmax(0)
    logprob = logits.log_softmax(0)
    estimate = KL_FN.get("corrected_k3")().calculate_kl(logprob, q.log(), old)
    [gradient] = torch.autograd.grad((old.exp() * estimate).sum(), logits)
    logprob = logits.log_softmax(0)
    [exact] = torch.autograd.grad((logprob.exp() * (logprob - q.log())).sum(), logits)
    assert gradient.tolist() == pytest.approx(exact.tolist(), abs=1e-6)


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_wide_gaps_stay_finite(name, gap):
    logprob = torch.tensor([[-1.0]], requires_grad=True)
    kl = KL_FN.get(name)().calculate_kl(logprob, logprob.detach() + gap, logprob.detach() - gap)
    kl.sum().backward()
    assert kl.isfinite().all() and logprob.grad.isfinite().all()


def test_penalty_in_the_reward_by_hand():
    kl = KL_FN.get("k1")(kl_coef=0.5)
    old = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-9.0, -9.0]])
    ref = torch.tensor([[-2.0, -1.0], [-3.0, -9.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]]).bool()
    scores = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
    rewards, metrics = kl.apply_kl_penalty_to_reward(scores, old, ref, mask)
    assert rewards.tolist() == [[-0.5, 1.0], [1.0, 0.0], [0.0, 0.0]]
    assert metrics == {"kl": pytest.approx((0.5 + 2) / 2), "kl_coef": 0.5}
    assert kl.kl_coef == 0.5


def test_adaptive_controller_by_hand():
    kl = KL_FN.get("k2")(adaptive=True, kl_coef=1.0, target_kl=2.0, horizon=100)
    kl.update_kl_coef(2.2, 10)
    assert kl.kl_coef == pytest.approx(1 + 0.1 * 0.1)
    kl.update_kl_coef(50.0, 10)
    assert kl.kl_coef == pytest.approx(1.01 * 1.02)
    kl.update_kl_coef(0.0, 10)
    assert kl.kl_coef == pytest.approx(1.01 * 1.02 * 0.98)
    resumed = KL_FN.get("k2")(adaptive=True, kl_coef=1.0, target_kl=2.0, horizon=100)
    resumed.load_state_dict(kl.state_dict())
    assert resumed.kl_coef == kl.kl_coef


def test_the_penalty_moves_an_adaptive_coefficient_after_its_use():
    kl = KL_FN.get("k1")(adaptive=True, kl_coef=1.0, target_kl=1.0, horizon=1)
    old, ref = torch.tensor([[0.0]]), torch.tensor([[-3.0]])
    _, metrics = kl.apply_kl_penalty_to_reward(torch.zeros(1, 1), old, ref, torch.tensor([[True]]))
    assert metrics["kl_coef"] == 1.0
    assert kl.kl_coef == pytest.approx(1.2)


def test_adaptive_needs_target_and_horizon():
    with pytest.raises(ValueError, match="target_kl and horizon"):
        KL_FN.get("k2")(adaptive=True)
    for target_kl, horizon in ((-0.1, 1.0), (0.1, -1.0), (0.0, 1.0), (0.1, 0.0)):
        with pytest.raises(ValueError, match="target_kl and horizon"):
            KL_FN.get("k2")(adaptive=True, target_kl=target_kl, horizon=horizon)
    assert KL_FN.get("k2")(adaptive=True, target_kl=0.1, horizon=0.5).target_kl == 0.1
