"""Every policy loss against numbers worked out by hand: value, gradient, metrics."""

import math
import warnings

import pytest
import torch

from trinity.algorithm import POLICY_LOSS_FN
from trinity.algorithm.aggregate import LossScope, loss_scope
from trinity.algorithm.policy_loss_fn.mix import chord_mu

LN2 = math.log(2)


def run(name, args=None, *, ratio, advantages, p=None, mask=None, **extra):
    """Loss, gradient by logprob and metrics; ``ratio`` and probability ``p`` are lists of rows."""
    ratio = torch.tensor(ratio, dtype=torch.float64)
    probability = torch.full_like(ratio, 0.5) if p is None else torch.tensor(p, dtype=torch.float64)
    logprob = probability.log().requires_grad_()
    tensors = {
        "logprob": logprob,
        "old_logprob": (logprob - ratio.log()).detach(),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "action_mask": torch.ones_like(ratio).bool() if mask is None else torch.tensor(mask).bool(),
        **extra,
    }
    loss_fn = POLICY_LOSS_FN.get(name)(**(args or {}))
    loss, metrics = loss_fn(**{n: tensors[n] for n in loss_fn.inputs() if n in tensors})
    loss.backward()
    return loss.item(), logprob.grad.tolist(), {k: v.item() for k, v in metrics.items()}


def test_ppo_clips_on_the_side_of_the_advantage():
    loss, gradient, metrics = run(
        "ppo", ratio=[[1.5, 1.5, 0.5, 0.5, 1.0]], advantages=[[1.0, -1.0, 1.0, -1.0, 2.0]]
    )
    # -1.2 (clipped), 1.5, -0.5, 0.8 (clipped), -2
    assert loss == pytest.approx((-1.2 + 1.5 - 0.5 + 0.8 - 2) / 5)
    assert gradient[0] == pytest.approx([0, 1.5 / 5, -0.5 / 5, 0, -2 / 5])
    assert metrics["pg_clipfrac"] == pytest.approx(2 / 5)
    assert metrics["pg_clipfrac_lower"] == 0
    assert metrics["ppo_kl"] == pytest.approx(-(2 * math.log(1.5) + 2 * math.log(0.5)) / 5)
    assert metrics["pg_loss"] == pytest.approx(loss)


def test_ppo_dual_clip_bounds_the_loss_of_a_negative_advantage():
    loss, gradient, metrics = run("ppo", ratio=[[8.0, 2.0]], advantages=[[-1.0, -1.0]])
    assert loss == pytest.approx((3 + 2) / 2)
    assert gradient[0] == pytest.approx([0, 1])
    assert metrics["pg_clipfrac_lower"] == pytest.approx(0.5)
    with pytest.raises(ValueError, match="clip_ratio_c is 1"):
        POLICY_LOSS_FN.get("ppo")(clip_ratio_c=1.0)


def test_ppo_sides_of_the_clip_may_differ():
    args = {"clip_range": 0.1, "clip_range_high": 0.3}
    loss, _, _ = run("ppo", args, ratio=[[2.0, 0.5]], advantages=[[1.0, -1.0]])
    assert loss == pytest.approx((-1.3 + 0.9) / 2)


def test_ppo_sequence_masking_keeps_the_denominator():
    args = {"enable_sequence_masking": True, "delta_sequence_masking": 0.1}
    rows = [[0.5, 0.5], [1.0, 1.0]]  # mean of old - new: 0.69 and 0
    loss, gradient, metrics = run("ppo", args, ratio=rows, advantages=[[-1.0, 1.0], [-1.0, -1.0]])
    assert loss == pytest.approx((0 - 0.5 + 1 + 1) / 4)
    assert gradient[0] == pytest.approx([0, -0.5 / 4])
    assert metrics["seq_mask/masked_tokens"] == pytest.approx(1 / 4)
    assert metrics["seq_mask/mean_sequence_kl"] == pytest.approx(LN2 / 2)


def test_ppo_fallback_has_the_gradient_of_reinforce():
    args = {"fallback_to_policy_gradient": True}
    loss, gradient, metrics = run("ppo", args, ratio=[[5.0, 0.1]], advantages=[[1.0, -2.0]])
    assert loss == pytest.approx((-1 + 2) / 2)
    assert gradient[0] == pytest.approx([-0.5, 1])
    assert metrics["pg_clipfrac"] == 0


def test_gspo_ratio_is_the_geometric_mean_of_the_sequence():
    args = {"clip_range_low": 0.1, "clip_range_high": 0.2}
    ratios = [[4.0, 1.0], [1.21, 1.0], [9.0, 9.0]]
    mask = [[1, 1], [1, 1], [1, 0]]
    loss, gradient, metrics = run(
        "gspo", args, ratio=ratios, advantages=[[1.0, 1.0], [1.0, 1.0], [-1.0, -1.0]], mask=mask
    )
    # s = 2 (clipped to 1.2), 1.1, 9; means over tokens, then rows
    assert loss == pytest.approx((-1.2 - 1.1 + 9) / 3)
    assert gradient == [
        pytest.approx([0, 0]),
        pytest.approx([-1.1 / 6, -1.1 / 6]),
        pytest.approx([3, 0]),
    ]
    assert metrics["ppo_kl_seq"] == pytest.approx(-(LN2 + math.log(1.1) + math.log(9)) / 3)
    assert metrics["pg_clipfrac"] == pytest.approx(2 / 5)


def test_gspo_warns_of_another_aggregation():
    with pytest.warns(UserWarning, match="'token-mean'"):
        POLICY_LOSS_FN.get("gspo")(loss_agg_mode="token-mean")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        POLICY_LOSS_FN.get("gspo")()


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    loss, gradient, metrics = run("cispo", ratio=[[2.0, 0.5]], advantages=[[1.0, -1.0]])
    # weights 1.28 and 0.5, logprob -ln 2
    assert loss == pytest.approx((1.28 * LN2 - 0.5 * LN2) / 2)
    assert gradient[0] == pytest.approx([-0.64, 0.25])
    assert metrics["cispo_loss"] == pytest.approx(loss)
    assert metrics["unmasked_frac"] == 1


def test_cispo_mask_drops_what_ppo_would_mute():
    args = {"enable_mask_clip": True, "mask_clip_range_low": 0.2, "mask_clip_range_high": 0.28}
    _, gradient, metrics = run(
        "cispo",
        args,
        ratio=[[2.0, 2.0, 0.5, 0.5, 1.2, 0.9]],
        advantages=[[1.0, -1.0, 1.0, -1.0, 1.0, -1.0]],
    )
    assert gradient[0] == pytest.approx([0, 1.28 / 6, -0.5 / 6, 0, -1.2 / 6, 0.9 / 6])
    assert metrics["unmasked_frac"] == pytest.approx(4 / 6)


def test_sapo_gate_by_sign_of_the_advantage():
    args = {"tau_pos": 1.0, "tau_neg": 2.0}
    loss, gradient, _ = run("sapo", args, ratio=[[2.0, 2.0]], advantages=[[1.0, -1.0]])
    positive, negative = 4 / (1 + math.exp(-1)), 2 / (1 + math.exp(-2))
    assert loss == pytest.approx((positive - negative) * LN2 / 2)
    assert gradient[0] == pytest.approx([-positive / 2, negative / 2])
    with pytest.raises(ValueError, match=r"tau_neg is 0\.5"):
        POLICY_LOSS_FN.get("sapo")(tau_neg=0.5)


def test_sapo_through_the_gate_has_gradient_4_p_1_minus_p_ratio():
    args = {"gate_as_weight": False}
    loss, gradient, _ = run("sapo", args, ratio=[[1.0, 2.0]], advantages=[[1.0, 1.0]])
    sigmoid = 1 / (1 + math.exp(-1))
    assert loss == pytest.approx(-(2 + 4 * sigmoid) / 2)
    assert gradient[0] == pytest.approx([-1 / 2, -4 * sigmoid * (1 - sigmoid) * 2 / 2])


def test_topr_tapers_bad_samples_only():
    loss, gradient, metrics = run("topr", ratio=[[0.25, 0.25, 4.0]], advantages=[[1.0, -1.0, -1.0]])
    assert loss == pytest.approx((LN2 - 0.25 * LN2 - LN2) / 3)
    assert gradient[0] == pytest.approx([-1 / 3, 0.25 / 3, 1 / 3])
    assert metrics["alpha"] == pytest.approx(2.25 / 3)
    args = {"advantage_threshold": 0.5}
    _, _, metrics = run("topr", args, ratio=[[0.25, 0.25]], advantages=[[0.5, 0.6]])
    assert metrics["alpha"] == pytest.approx(1.25 / 2)


def test_opmd_divides_by_one_plus_tau():
    loss, gradient, _ = run("opmd", {"tau": 3.0}, ratio=[[7.0, 7.0]], advantages=[[1.0, -2.0]])
    assert loss == pytest.approx((LN2 - 2 * LN2) / 2 / 4)
    assert gradient[0] == pytest.approx([-1 / 8, 2 / 8])


def test_sppo_has_no_gradient_outside_its_region():
    loss, gradient, metrics = run(
        "sppo", ratio=[[1.2, 1.4, 0.8, 0.7]], advantages=[[1.0, 1.0, -1.0, -1.0]]
    )
    assert loss == pytest.approx((-math.log(1.2) + math.log(0.8)) / 4)
    assert gradient[0] == pytest.approx([-1 / 4, 0, 1 / 4, 0])
    assert metrics["pg_clipfrac"] == pytest.approx(0.5)
    assert metrics["ppo_kl"] == pytest.approx(-math.log(1.2 * 1.4 * 0.8 * 0.7) / 4)
    with pytest.raises(ValueError, match="epsilon is 0"):
        POLICY_LOSS_FN.get("sppo")(epsilon=0)


def test_importance_sampling_is_unclipped():
    loss, gradient, _ = run("importance_sampling", ratio=[[5.0, 0.5]], advantages=[[1.0, -1.0]])
    assert loss == pytest.approx((-5 + 0.5) / 2)
    assert gradient[0] == pytest.approx([-2.5, 0.25])


REC_RATIOS = [[0.3, 0.7, 1.0, 1.5, 4.0]]
REC_KEPT = {
    ("none", 1): [1, 1, 1, 1, 1],
    ("two-side", 1): [0, 0, 1, 0, 0],
    ("one-side", 1): [1, 1, 1, 0, 0],
    ("one-side", -1): [0, 0, 1, 1, 1],
    ("ring", 1): [1, 0, 1, 0, 0],
    ("ring", -1): [0, 0, 1, 0, 1],
}


@pytest.mark.parametrize(("clip_mode", "sign"), REC_KEPT)
def test_rec_keeps_tokens_by_clip_mode(clip_mode, sign):
    kept = REC_KEPT[clip_mode, sign]
    advantages = [[float(sign)] * 5]
    _, gradient, metrics = run(
        "rec", {"clip_mode": clip_mode}, ratio=REC_RATIOS, advantages=advantages
    )
    assert gradient[0] == pytest.approx([-sign * keep / 5 for keep in kept])
    assert metrics["pg_clipfrac"] == pytest.approx(1 - sum(kept) / 5)


def test_rec_by_sequence():
    args = {"clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling"}
    ratios = [[4.0, 0.25], [1.21, 1.0], [4.0, 4.0]]
    advantages = [[1.0, 1.0], [-1.0, -1.0], [1.0, 1.0]]
    loss, gradient, _ = run("rec", args, ratio=ratios, advantages=advantages)
    assert loss == pytest.approx((LN2 - 1.1 * LN2 + 0) / 3)
    assert gradient[1] == pytest.approx([1.1 / 6, 1.1 / 6])
    assert gradient[2] == pytest.approx([0, 0])


def test_rec_by_sequence_may_weight_by_the_ratio_of_the_token():
    args = {"clip_mode": "gspo-one-side", "weight": "importance_sampling"}
    _, gradient, _ = run("rec", args, ratio=[[4.0, 0.25]], advantages=[[1.0, 1.0]])
    assert gradient[0] == pytest.approx([-2, -0.125])


def test_rec_weights_and_regularizers():
    ratios, advantages = [[2.0, 1.0]], [[1.0, -1.0]]
    _, gradient, _ = run(
        "rec", {"weight": "importance_sampling"}, ratio=ratios, advantages=advantages
    )
    assert gradient[0] == pytest.approx([-1, 0.5])
    _, gradient, _ = run(
        "rec", {"weight": "advantage", "temp": 2.0}, ratio=ratios, advantages=advantages
    )
    assert gradient[0] == pytest.approx([-math.exp(0.5) / 2, math.exp(-0.5) / 2])
    k2 = {"regularizer": "k2", "regularizer_coef": 0.1}
    loss, gradient, _ = run("rec", k2, ratio=ratios, advantages=[[0.0, 0.0]])
    assert loss == pytest.approx(0.1 * LN2**2 / 2)
    assert gradient[0] == pytest.approx([0.1 * LN2, 0])
    forward = {"regularizer": "forward-kl", "regularizer_coef": 0.1}
    loss, gradient, _ = run("rec", forward, ratio=ratios, advantages=[[0.0, 0.0]])
    assert loss == pytest.approx(0.1 * LN2)
    assert gradient[0] == pytest.approx([-0.05, -0.05])


def test_rec_is_a_mean_over_tokens_and_by_sequence_one_over_rows():
    rows = {"ratio": [[1.0, 1.0]] * 2, "advantages": [[1.0, 1.0], [-2.0, 0.0]]}
    loss, _, _ = run("rec", **rows, mask=[[1, 1], [1, 0]])
    assert loss == pytest.approx((LN2 + LN2 - 2 * LN2) / 3)
    loss, _, _ = run("rec", {"clip_mode": "gspo-one-side"}, **rows, mask=[[1, 1], [1, 0]])
    assert loss == pytest.approx((LN2 - 2 * LN2) / 2)


def test_rec_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="clip_mode is 'both'"):
        POLICY_LOSS_FN.get("rec")(clip_mode="both")
    with pytest.raises(ValueError, match="gspo-one-side"):
        POLICY_LOSS_FN.get("rec")(weight="gspo_importance_sampling")


def test_sft_and_its_weighted_forms():
    probability, ones = [[0.5, 0.25]], [[1.0, 1.0]]
    loss, gradient, metrics = run("sft", ratio=ones, advantages=ones, p=probability)
    assert loss == pytest.approx(1.5 * LN2)
    assert gradient[0] == pytest.approx([-0.5, -0.5])
    assert metrics == {"sft_loss": pytest.approx(loss)}
    loss, gradient, _ = run("sft_is", ratio=ones, advantages=ones, p=probability)
    assert loss == pytest.approx((0.5 * LN2 + 0.25 * 2 * LN2) / 2)
    assert gradient[0] == pytest.approx([-0.25, -0.125])
    loss, gradient, metrics = run("sft_phi", ratio=ones, advantages=ones, p=probability)
    assert loss == pytest.approx((0.25 * LN2 + 0.1875 * 2 * LN2) / 2)
    assert gradient[0] == pytest.approx([-0.125, -0.1875 / 2])
    assert metrics == {"sft_phi_loss": pytest.approx(loss)}


def test_sft_phi_cutoff_mutes_likely_tokens():
    ones = [[1.0, 1.0]]
    loss, gradient, _ = run(
        "sft_phi", {"cutoff_prob": 0.5}, ratio=ones, advantages=ones, p=[[0.9, 0.25]]
    )
    assert loss == pytest.approx((0.25 * LN2 + 0.1875 * 2 * LN2) / 2)
    assert gradient[0] == pytest.approx([0, -0.1875 / 2])
    for cutoff in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"cutoff_prob is {cutoff}"):
            POLICY_LOSS_FN.get("sft_phi")(cutoff_prob=cutoff)


EXPERTS = {"expert_mask": torch.tensor([False, True])}


def test_mix_weighs_the_means_of_both_parts():
    loss, gradient, metrics = run(
        "mix",
        {"mu": 0.25},
        ratio=[[1.5, 1.0], [1.0, 1.0]],
        advantages=[[1.0, 2.0], [0.0, 0.0]],
        mask=[[1, 1], [1, 0]],
        **EXPERTS,
    )
    usual, expert = (-1.2 - 2) / 2, LN2
    assert loss == pytest.approx(0.75 * usual + 0.25 * expert)
    assert gradient[0] == pytest.approx([0, -0.75])
    assert gradient[1] == pytest.approx([-0.25, 0])
    assert metrics["usual/pg_loss"] == pytest.approx(usual)
    assert metrics["usual/pg_clipfrac"] == pytest.approx(0.5)
    assert metrics["expert/sft_loss"] == pytest.approx(expert)
    assert metrics["loss"] == pytest.approx(loss)


def test_mix_without_expert_rows_is_scaled_ppo():
    loss, _, _ = run("mix", ratio=[[1.0]], advantages=[[1.0]], expert_mask=torch.tensor([False]))
    assert loss == pytest.approx(-0.9)


def test_mix_says_that_batch_sizes_are_not_needed():
    with pytest.warns(UserWarning, match="train_batch_size_usual, train_batch_size_expert"):
        POLICY_LOSS_FN.get("mix")(train_batch_size_usual=8, train_batch_size_expert=8)


def test_mix_modes_may_differ_by_part():
    args = {"mu": 0.5, "sft_loss_agg_mode": "seq-mean-token-sum", "loss_agg_mode": "token-mean"}
    loss, _, _ = run("mix", args, ratio=[[1.0, 1.0]] * 2, advantages=[[1.0, 1.0]] * 2, **EXPERTS)
    assert loss == pytest.approx(0.5 * -1 + 0.5 * 2 * LN2)


@pytest.mark.parametrize(
    ("name", "half"),
    [("mix", {"mu": 0.5}), ("mix_chord", {"mu_valley": 0.5, "enable_phi_function": False})],
)
def test_settings_of_mix_reach_their_part(name, half):
    extra = {**EXPERTS, "step": torch.tensor([0, 0])} if name == "mix_chord" else EXPERTS
    batch = {"ratio": [[2.0, 0.5]] * 2, "advantages": [[1.0, -1.0]] * 2, **extra}

    def loss(**args):
        return run(name, {**half, **args}, **batch)[0]

    expert = LN2
    assert loss(clip_range=0.1) == pytest.approx(((-1.1 + 0.9) / 2 + expert) / 2)
    sides = {"clip_range_low": 0.4, "clip_range_high": 0.3}
    assert loss(**sides) == pytest.approx(((-1.3 + 0.6) / 2 + expert) / 2)
    summed = "seq-mean-token-sum"
    assert loss(**sides, grpo_loss_agg_mode=summed) == pytest.approx((-1.3 + 0.6 + expert) / 2)
    assert loss(**sides, sft_loss_agg_mode=summed) == pytest.approx((-0.7 / 2 + 2 * expert) / 2)
    assert loss(**sides, loss_agg_mode=summed) == pytest.approx((-0.7 + 2 * expert) / 2)


def test_metrics_of_mix_are_means_over_their_part_of_the_step():
    mask = torch.ones(2, 1).bool()
    batch = {"ratio": [[1.5], [1.0]], "advantages": [[1.0], [0.0]], **EXPERTS}
    with loss_scope(LossScope.of(mask, expert_mask=EXPERTS["expert_mask"])):
        loss, _, metrics = run("mix", **batch)
    assert loss == pytest.approx(-0.9 * 1.2 + 0.1 * LN2)
    assert metrics["usual/pg_clipfrac"] == 1
    assert metrics["usual/ppo_kl"] == pytest.approx(-math.log(1.5))


def test_mix_refuses_a_weight_that_is_no_share():
    for mu in (0.0, 1.0):
        assert POLICY_LOSS_FN.get("mix")(mu=mu).mu == mu
    for mu in (-0.1, 1.1):
        with pytest.raises(ValueError, match=rf"mu is {mu}"):
            POLICY_LOSS_FN.get("mix")(mu=mu)


def test_chord_schedule():
    def mu(step):
        return chord_mu(step, warmup=4, decay=4, peak=0.8, valley=0.2)

    assert [mu(s) for s in (0, 2, 4, 6, 8, 100)] == pytest.approx([0, 0.4, 0.8, 0.5, 0.2, 0.2])
    assert chord_mu(0, warmup=0, decay=0, peak=0.8, valley=0.2) == 0.2


def test_mix_chord_takes_mu_of_its_step():
    args = {"mu_warmup_steps": 10, "mu_decay_steps": 10, "mu_peak": 0.5, "mu_valley": 0.1}
    extra = {**EXPERTS, "step": torch.tensor([5, 5])}
    batch = {"ratio": [[1.0], [1.0]], "advantages": [[1.0], [0.0]]}
    loss, _, metrics = run("mix_chord", args, **batch, **extra)
    assert metrics["mu"] == pytest.approx(0.25)
    assert loss == pytest.approx(0.75 * -1 + 0.25 * 0.25 * LN2)
    assert metrics["expert/sft_phi_loss"] == pytest.approx(0.25 * LN2)
    plain, _, _ = run("mix_chord", {**args, "enable_phi_function": False}, **batch, **extra)
    assert plain == pytest.approx(0.75 * -1 + 0.25 * LN2)
    with pytest.raises(ValueError, match=r"different steps: \[5, 6\]"):
        run("mix_chord", args, **batch, **EXPERTS, step=torch.tensor([5, 6]))


PAIRS = {
    "logprob": torch.tensor([[-1.0, -1.0], [-2.0, -9.0], [-1.0, -2.0], [-1.0, -1.0]]),
    "ref_logprob": torch.tensor([[-2.0, -2.0], [-2.0, -9.0], [-1.0, -1.0], [-2.0, -2.0]]),
    "action_mask": torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]]).bool(),
}


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def test_dpo_sums_each_row_on_its_own():
    loss, metrics = POLICY_LOSS_FN.get("dpo")(beta=0.5)(**PAIRS)
    # log ratios to the reference: 2, 0 | -1, 2; margins 2 and -3
    assert loss.item() == pytest.approx(-(log_sigmoid(1.0) + log_sigmoid(-1.5)) / 2)
    assert metrics["chosen_reward"].item() == pytest.approx(0.5 * (2 - 1) / 2)
    assert metrics["rejected_reward"].item() == pytest.approx(0.5 * (0 + 2) / 2)
    assert metrics["accuracy_mean"].item() == pytest.approx(0.5)
    assert metrics["dpo_loss"].item() == pytest.approx(loss.item())


def test_dpo_label_smoothing():
    loss, _ = POLICY_LOSS_FN.get("dpo")(beta=1.0, label_smoothing=0.2)(
        **{name: value[:2] for name, value in PAIRS.items()}
    )
    assert loss.item() == pytest.approx(-0.8 * log_sigmoid(2) - 0.2 * log_sigmoid(-2))


def test_dpo_finds_pairs_by_id():
    order = [3, 0, 2, 1]
    ids = {"pair_id": torch.tensor([4, 4, 9, 9]), "is_chosen": torch.tensor([1, 0, 1, 0]).bool()}
    loss_fn = POLICY_LOSS_FN.get("dpo")()
    straight, _ = loss_fn(**PAIRS)
    shuffled, _ = loss_fn(**{name: value[order] for name, value in (PAIRS | ids).items()})
    assert shuffled.item() == pytest.approx(straight.item())


def test_dpo_leaves_out_a_pair_with_an_empty_answer():
    ids = {"pair_id": torch.tensor([4, 4, 9, 9]), "is_chosen": torch.tensor([1, 0, 1, 0]).bool()}
    mask = PAIRS["action_mask"].clone()
    mask[3] = False
    loss_fn = POLICY_LOSS_FN.get("dpo")()
    batch = {**PAIRS, **ids, "action_mask": mask}
    loss, _ = loss_fn(**batch)
    first, _ = loss_fn(**{name: value[:2] for name, value in batch.items()})
    assert loss.item() == pytest.approx(first.item())
    with loss_scope(LossScope.of(mask, pair_id=ids["pair_id"])):
        scoped, _ = loss_fn(**batch)
    assert scoped.item() == pytest.approx(first.item())


def test_dpo_refuses_half_a_pair():
    ids = {"pair_id": torch.tensor([4, 4, 9, 9]), "is_chosen": torch.tensor([1, 0, 1, 0]).bool()}
    batch = PAIRS | ids
    loss_fn = POLICY_LOSS_FN.get("dpo")()
    with pytest.raises(ValueError, match="one micro-batch"):
        loss_fn(**{name: value[:3] for name, value in batch.items()})
    with pytest.raises(ValueError, match="one chosen and one rejected"):
        loss_fn(**{**batch, "is_chosen": torch.ones(4).bool()})
    with pytest.raises(ValueError, match="skip it"):
        loss_fn(**{**batch, "action_mask": torch.zeros(4, 2).bool()})


def test_without_a_scope_dpo_in_a_scope_of_rows_counts_half_of_them():
    with loss_scope(LossScope.of(PAIRS["action_mask"])):
        halves = [
            POLICY_LOSS_FN.get("dpo")()(**{n: v[p] for n, v in PAIRS.items()})[0]
            for p in (slice(0, 2), slice(2, 4))
        ]
    whole, _ = POLICY_LOSS_FN.get("dpo")()(**PAIRS)
    assert sum(halves).item() == pytest.approx(whole.item())
