"""Extreme but possible inputs give finite losses and gradients."""

import pytest
import torch

from trinity.algorithm import ADVANTAGE_FN, POLICY_LOSS_FN

ROWS = 4


def batch(gap: float, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Rows of two tokens whose log ratio to the old and the reference policy is ``gap``."""
    logprob = torch.full((ROWS, 2), -1.0 if gap < 0 else -1.0 - abs(gap))
    sign = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    return {
        "logprob": logprob,
        "old_logprob": logprob - gap,
        "ref_logprob": logprob - gap,
        "action_mask": torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]]).bool(),
        "advantages": scale * sign.expand(ROWS, 2),
        "expert_mask": torch.tensor([0, 0, 1, 1]).bool(),
        "step": torch.zeros(ROWS).int(),
        "pair_id": torch.tensor([0, 0, 1, 1]),
        "is_chosen": torch.tensor([1, 0, 1, 0]).bool(),
    }


@pytest.mark.parametrize("name", POLICY_LOSS_FN.names())
@pytest.mark.parametrize("gap", [0.0, 100.0, -100.0])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e6])
def test_losses_stay_finite(name, gap, scale):
    tensors = batch(gap, scale)
    tensors["logprob"].requires_grad_()
    loss_fn = POLICY_LOSS_FN.get(name)()
    loss, metrics = loss_fn(**{n: tensors[n] for n in loss_fn.inputs()})
    loss.backward()
    assert loss.isfinite()
    assert tensors["logprob"].grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize(
    "args",
    [
        {"clip_mode": "ring", "weight": "importance_sampling"},
        {"clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling"},
        {"weight": "advantage", "regularizer": "k2", "regularizer_coef": 1.0},
    ],
)
def test_rec_stays_finite(args):
    for gap in (100.0, -100.0):
        tensors = batch(gap, 1e6)
        tensors["logprob"].requires_grad_()
        loss, _ = POLICY_LOSS_FN.get("rec")(**args)(
            *(tensors[n] for n in ("logprob", "old_logprob", "action_mask", "advantages"))
        )
        loss.backward()
        assert tensors["logprob"].grad.isfinite().all()


@pytest.mark.parametrize(
    "name", [n for n in ADVANTAGE_FN.names() if ADVANTAGE_FN.get(n).compute_in_trainer()]
)
def test_trainer_advantages_stay_finite(name):
    columns = {
        "action_mask": torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1]]).bool(),
        "token_level_rewards": torch.tensor([[0, 1e6], [1e6, 0], [0, 0], [0, -1e6]]),
        "group_id": torch.tensor([0, 0, 1, 2]),
        "values": torch.full((4, 2), -1e6),
        "old_logprob": torch.tensor([[-100.0, 0.0]] * 4),
        "teacher_logprobs": torch.tensor([[0.0, -100.0]] * 4),
        "entropy": torch.full((4, 2), 12.0),
        "necs": torch.zeros(4, 2),
        "reward_baselines": torch.full((4,), 1e6),
    }
    fn = ADVANTAGE_FN.get(name)()
    advantages, returns, metrics = fn(columns)
    mask, clip_metrics = fn.loss_mask(columns, advantages)
    assert advantages.isfinite().all() and returns.isfinite().all()
    assert mask.dtype == torch.bool
    assert all(abs(value) < float("inf") for value in (metrics | clip_metrics).values())
