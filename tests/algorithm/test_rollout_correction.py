import math

import pytest
import torch

from trinity.algorithm.rollout_correction import RolloutCorrection, effective_sample_size

# ratios of trainer to engine by row: (4, 1), (0.5, hidden), (1, 1), all masked
RATIO = torch.tensor([[4.0, 1.0], [0.5, 9.0], [1.0, 1.0], [9.0, 9.0]])
MASK = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]]).bool()
ROLLOUT = torch.full((4, 2), -1.0)
OLD = ROLLOUT + RATIO.log()


def correct(**args):
    return RolloutCorrection(**args)(OLD, ROLLOUT, MASK)


def test_without_levels_it_only_measures():
    found = correct()
    assert found.weights.tolist() == MASK.float().tolist()
    assert torch.equal(found.mask, MASK)
    metrics = found.metrics
    assert metrics["rollout_corr/ratio_mean"] == pytest.approx((4 + 1 + 0.5 + 1 + 1) / 5)
    assert metrics["rollout_corr/ratio_max"] == pytest.approx(4)
    assert metrics["rollout_corr/ratio_min"] == pytest.approx(0.5)
    assert metrics["rollout_corr/kl"] == pytest.approx(-(math.log(4) + math.log(0.5)) / 5)
    k3 = (4 - 1 - math.log(4)) + (0.5 - 1 - math.log(0.5))
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(k3 / 5)
    assert metrics["rollout_corr/log_ratio_abs_max"] == pytest.approx(math.log(4))
    assert metrics["rollout_corr/ess"] == pytest.approx(1)


def test_token_level_truncated():
    found = correct(rollout_is="token", rollout_is_threshold=2.0)
    assert found.weights.tolist() == [pytest.approx(r) for r in ([2, 1], [0.5, 0], [1, 1], [0, 0])]
    assert found.metrics["rollout_corr/weight_mean"] == pytest.approx(5.5 / 5)
    assert found.metrics["rollout_corr/weight_max"] == pytest.approx(2)
    assert found.metrics["rollout_corr/ess"] == pytest.approx(5.5**2 / (5 * (4 + 1 + 0.25 + 1 + 1)))


def test_token_level_masked():
    found = correct(rollout_is="token", rollout_is_mode="mask", rollout_is_threshold=1.5)
    # lower bound 1 / 1.5
    assert found.weights.tolist() == [pytest.approx(r) for r in ([0, 1], [0, 0], [1, 1], [0, 0])]
    assert torch.equal(found.mask, MASK)
    wide = correct(
        rollout_is="token",
        rollout_is_mode="mask",
        rollout_is_threshold=5,
        rollout_is_threshold_lower=0.1,
    )
    assert wide.weights[1, 0].item() == pytest.approx(0.5)


def test_sequence_and_geometric_levels():
    found = correct(rollout_is="sequence", rollout_is_threshold=3.0)
    assert found.weights.tolist() == [pytest.approx(r) for r in ([3, 3], [0.5, 0], [1, 1], [0, 0])]
    found = correct(rollout_is="geometric", rollout_is_threshold=3.0)
    assert found.weights[0].tolist() == pytest.approx([2, 2])
    masked = correct(rollout_is="sequence", rollout_is_mode="mask", rollout_is_threshold=3.0)
    assert masked.weights[:3].tolist() == [pytest.approx(r) for r in ([0, 0], [0.5, 0], [1, 1])]


def test_weights_may_be_normalized():
    for most in (2.0, 1.0):  # means of 1.1 and 0.9
        found = correct(
            rollout_is="token", rollout_is_threshold=most, rollout_is_batch_normalize=True
        )
        assert found.weights[MASK].mean().item() == pytest.approx(1)


def test_rejection_takes_tokens_or_rows_out_of_the_mask():
    found = correct(rollout_rs="token", rollout_rs_threshold=2.0)
    assert found.mask.tolist() == [[False, True], [True, False], [True, True], [False, False]]
    assert found.metrics["rollout_corr/rejected_tokens"] == pytest.approx(1 / 5)
    assert found.metrics["rollout_corr/rejected_rows"] == 0
    rows = correct(rollout_rs="sequence", rollout_rs_threshold=3.0, rollout_rs_threshold_lower=0.6)
    assert rows.mask.tolist() == [[False, False], [False, False], [True, True], [False, False]]
    assert rows.metrics["rollout_corr/rejected_rows"] == pytest.approx(2 / 3)
    veto = correct(rollout_token_veto_threshold=0.6)
    assert veto.mask.any(dim=1).tolist() == [True, False, True, False]


def test_columns_for_the_trainer():
    batch = {"old_logprob": OLD, "rollout_log_probs": ROLLOUT, "action_mask": MASK}
    columns, metrics = RolloutCorrection(rollout_is="token").of_batch(batch)
    assert set(columns) == {"action_mask", "rollout_weights"}
    assert metrics["rollout_corr/ratio_max"] == pytest.approx(4)


def test_wide_gaps_and_empty_batches_are_safe():
    correction = RolloutCorrection(rollout_is="sequence", rollout_rs="token")
    for gap in (100.0, -100.0):
        found = correction(ROLLOUT + gap, ROLLOUT, MASK)
        assert found.weights.isfinite().all()
        assert not found.mask.any()
    empty = correction(OLD, ROLLOUT, torch.zeros_like(MASK))
    assert empty.metrics == {}


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="rollout_is is 'word'"):
        RolloutCorrection(rollout_is="word")
    with pytest.raises(ValueError, match="rollout_is_mode is 'drop'"):
        RolloutCorrection(rollout_is_mode="drop")
    with pytest.raises(ValueError, match="rollout_rs_threshold_lower is 3"):
        RolloutCorrection(rollout_rs_threshold_lower=3)
    with pytest.raises(ValueError, match="rollout_is_threshold is 0"):
        RolloutCorrection(rollout_is_threshold=0)
    assert RolloutCorrection.default_args()["rollout_is_threshold"] == 2.0


def test_effective_sample_size():
    assert effective_sample_size(torch.tensor([1.0, 1.0])) == 1
    assert effective_sample_size(torch.tensor([1.0, 0.0])) == 0.5
    assert effective_sample_size(torch.zeros(2)) == 0


def test_rows_of_expert_data_are_left_as_they_are():
    """No engine sampled them: what is unlikely there is what is to be learned."""
    logprob = torch.tensor([[-1.0, -2.0], [-1.0, -9.0]])
    batch = {
        "old_logprob": logprob,
        "rollout_log_probs": torch.tensor([[-1.0, -2.0], [0.0, 0.0]]),
        "action_mask": torch.tensor([[True, True], [True, True]]),
        "expert_mask": torch.tensor([False, True]),
    }
    correction = RolloutCorrection(
        rollout_is="sequence", rollout_rs="token", rollout_token_veto_threshold=0.1
    )
    columns, metrics = correction.of_batch(batch)
    assert columns["action_mask"].tolist() == [[True, True], [True, True]]
    assert columns["rollout_weights"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert metrics["rollout_corr/log_ratio_abs_max"] == 0
    assert metrics["rollout_corr/rejected_tokens"] == 0
