"""Losses against those of TRL 1.16, run on the same random numbers.

TRL's own loss methods are called, with a stand-in for the trainer around them: log-probabilities
come from the test, not from a model. Needs `pip install trl==1.16.0` (no other pins).
"""

from collections import defaultdict
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from trinity.algorithm import ADVANTAGE_FN, KL_FN, POLICY_LOSS_FN

pytestmark = pytest.mark.slow  # importing TRL takes seconds

ROWS, WIDTH = 6, 9


def trl_trainer(name):
    """TRL's trainer class for ``name``; skips the test where TRL is absent."""
    pytest.importorskip("trl", minversion="1.16")
    return getattr(import_module(f"trl.trainer.{name.lower()}_trainer"), f"{name}Trainer")


class Accelerator:
    """One process: gathering gives back what it got."""

    num_processes = 1
    device = torch.device("cpu")
    sync_gradients = True
    parallelism_config = None

    def gather(self, value):
        return value

    gather_for_metrics = gather

    def reduce(self, value, reduction):
        return value


def trainer(**settings):
    """What TRL's loss methods read of their trainer."""
    return SimpleNamespace(
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        **settings,
    )


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    logprob = -torch.randn(ROWS, WIDTH, generator=generator).abs()
    old = logprob + 0.5 * torch.randn(ROWS, WIDTH, generator=generator)
    return {
        "logprob": logprob.requires_grad_(),
        "old_logprob": old,
        "ref_logprob": logprob.detach() + 0.5 * torch.randn(ROWS, WIDTH, generator=generator),
        "action_mask": torch.arange(WIDTH) < length[:, None],
        "advantage": torch.randn(ROWS, generator=generator),
    }


def trl_grpo(
    b,
    loss_type="dapo",
    level="token",
    low=0.2,
    high=0.2,
    delta=None,
    beta=0.0,
    threshold=None,
    **args,
):
    ids = torch.zeros(ROWS, WIDTH, dtype=torch.long)
    fake = trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            b["logprob"],
            torch.zeros(ROWS, WIDTH),
            None,
        ),
        args=SimpleNamespace(
            delta=delta,
            use_bias_correction_kl=args.pop("bias_correction", False),
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=threshold,
        get_off_policy_mask=trl_trainer("GRPO").get_off_policy_mask,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        max_completion_length=WIDTH,
        _entropy_bonus_enabled=False,
    )
    mask = b["action_mask"].long()
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": b["advantage"],
        "old_per_token_logps": b["old_logprob"],
        "ref_per_token_logps": b["ref_logprob"],
        "num_items_in_batch": mask.sum(),
    }
    return trl_trainer("GRPO")._compute_loss(fake, None, inputs)


def ours(name, b, **args):
    loss_fn = POLICY_LOSS_FN.get(name)(**args)
    tensors = {**b, "advantages": b["advantage"][:, None].expand(ROWS, WIDTH)}
    return loss_fn(**{n: tensors[n] for n in loss_fn.inputs()})[0]


def assert_equal(loss, expected, b):
    [gradient] = torch.autograd.grad(loss, b["logprob"], retain_graph=True)
    [expected_gradient] = torch.autograd.grad(expected, b["logprob"], retain_graph=True)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("loss_type", "mode"),
    [
        ("grpo", "seq-mean-token-mean"),
        ("bnpo", "token-mean"),
        ("dapo", "token-mean"),
        ("luspo", "seq-mean-token-sum"),
    ],
)
def test_grpo_and_dapo(seed, loss_type, mode):
    b = batch(seed)
    expected = trl_grpo(b, loss_type, low=0.2, high=0.28)
    # TRL has no dual clip unless asked
    loss = ours("ppo", b, clip_range_high=0.28, clip_ratio_c=1e9, loss_agg_mode=mode)
    assert_equal(loss, expected, b)


def test_dr_grpo_up_to_its_mean_over_rows():
    b = batch(4)
    horizon = int(b["action_mask"].sum(dim=1).max())
    loss = ours("ppo", b, clip_ratio_c=1e9, loss_agg_mode="seq-mean-token-sum-norm")
    assert_equal(loss * horizon / WIDTH / ROWS, trl_grpo(b, "dr_grpo"), b)


@pytest.mark.parametrize("seed", range(3))
def test_ppo_with_dual_clip(seed):
    b = batch(seed)
    b["old_logprob"] = b["old_logprob"] - 1.0  # ratios beyond the dual clip
    loss = ours("ppo", b, clip_ratio_c=3.0)
    assert_equal(loss, trl_grpo(b, "bnpo", delta=3.0), b)


@pytest.mark.parametrize("seed", range(3))
def test_off_policy_sequence_masking(seed):
    b = batch(seed)
    loss = ours(
        "ppo", b, clip_ratio_c=1e9, enable_sequence_masking=True, delta_sequence_masking=0.05
    )
    assert_equal(loss, trl_grpo(b, "bnpo", threshold=0.05), b)


@pytest.mark.parametrize("seed", range(3))
def test_gspo(seed):
    b = batch(seed)
    expected = trl_grpo(b, "grpo", level="sequence", low=0.03, high=0.04)
    assert_equal(ours("gspo", b, clip_range_low=0.03, clip_range_high=0.04), expected, b)


@pytest.mark.parametrize("seed", range(3))
def test_cispo(seed):
    b = batch(seed)
    assert_equal(ours("cispo", b, clip_range_high=0.5), trl_grpo(b, "cispo", high=1.5), b)


@pytest.mark.parametrize("seed", range(3))
def test_sapo_as_the_paper_has_it(seed):
    b = batch(seed)
    loss = ours("sapo", b, gate_as_weight=False, loss_agg_mode="seq-mean-token-mean")
    assert_equal(loss, trl_grpo(b, "sapo"), b)


@pytest.mark.parametrize("seed", range(3))
def test_grpo_with_kl(seed):
    b = batch(seed)
    kl, _ = KL_FN.get("k3")(kl_coef=0.1).calculate_kl_loss(
        b["logprob"], b["ref_logprob"], b["action_mask"]
    )
    assert_equal(ours("ppo", b, clip_ratio_c=1e9) + kl, trl_grpo(b, "bnpo", beta=0.1), b)


def test_corrected_k3():
    b = batch(5)
    b["old_logprob"] = b["logprob"].detach() - 0.1  # below the weight's bound of 2
    kl, _ = KL_FN.get("corrected_k3")(kl_coef=0.1).calculate_kl_loss(
        b["logprob"], b["ref_logprob"], b["action_mask"], old_logprob=b["old_logprob"]
    )
    expected = trl_grpo(b, "bnpo", beta=0.1, bias_correction=True)
    assert_equal(ours("ppo", b, clip_ratio_c=1e9) + kl, expected, b)


@pytest.mark.parametrize("seed", range(3))
def test_rloo_on_policy(seed):
    """TRL's ratio is of sequences, ours of tokens: on policy both have the same gradient."""
    b = batch(seed)
    rewards = torch.randn(ROWS, generator=torch.Generator().manual_seed(seed))
    others = (rewards.sum() - rewards) / (ROWS - 1)
    columns = {
        "token_level_rewards": rewards[:, None] * (torch.arange(WIDTH) == 0),
        "action_mask": b["action_mask"],
        "group_id": torch.zeros(ROWS, dtype=torch.long),
    }
    advantages, _, _ = ADVANTAGE_FN.get("rloo")()(columns)
    mask = b["action_mask"]
    torch.testing.assert_close(advantages, (rewards - others)[:, None] * mask)

    fake = trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            b["logprob"],
            torch.zeros(ROWS, WIDTH),
            None,
        ),
        epsilon_low=0.2,
        epsilon_high=0.2,
    )
    ids = torch.zeros(ROWS, WIDTH, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
        "completion_ids": ids,
        "completion_mask": mask.long(),
        "advantages": rewards - others,
        "old_logps": (b["logprob"] * mask).sum(1).detach(),
    }
    expected = trl_trainer("RLOO")._compute_loss(fake, None, inputs)
    loss, _ = POLICY_LOSS_FN.get("ppo")(loss_agg_mode="seq-mean-token-sum")(
        b["logprob"], b["logprob"].detach(), mask, advantages
    )
    [gradient] = torch.autograd.grad(loss, b["logprob"])
    [expected_gradient] = torch.autograd.grad(expected, b["logprob"])
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-5)


def model_outputs(logprob, mask):
    """A stand-in model whose fused head gives these log-probabilities (0 on ignored positions)."""
    zeros = torch.zeros_like(logprob.detach())
    outputs = SimpleNamespace(
        log_probs=logprob * mask,
        label_mask=mask,
        entropy=zeros,
        mean_logits=zeros,
        is_top1=zeros.bool(),
    )
    return lambda **_: outputs


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_dpo(seed, smoothing):
    b = batch(seed)
    mask = b["action_mask"]
    fake = trainer(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["aot"] if smoothing else ["sigmoid"],
        loss_weights=[1.0],
        beta=0.3,
        label_smoothing=smoothing,
        use_weighting=False,
    )
    rows = ROWS if not smoothing else 2  # "aot" sorts the pairs: with one pair it is smoothed DPO
    logprob, ref = b["logprob"][:rows], b["ref_logprob"][:rows]
    mask = mask[:rows]
    chosen_first = torch.cat([torch.arange(0, rows, 2), torch.arange(1, rows, 2)])
    ref_logps = (ref * mask).sum(1)
    inputs = {
        "input_ids": torch.zeros(rows, WIDTH + 1, dtype=torch.long),
        "attention_mask": torch.ones(rows, WIDTH + 1, dtype=torch.long),
        "completion_mask": torch.cat([torch.zeros(rows, 1), mask], dim=1)[chosen_first].long(),
        "ref_chosen_logps": ref_logps[0::2],
        "ref_rejected_logps": ref_logps[1::2],
    }
    model = model_outputs(logprob[chosen_first], mask[chosen_first])
    expected = trl_trainer("DPO")._compute_loss(fake, model, inputs, return_outputs=False)
    loss, metrics = POLICY_LOSS_FN.get("dpo")(beta=0.3, label_smoothing=smoothing)(
        logprob, ref, mask
    )
    assert_equal(loss, expected, b)
    rewards = fake._metrics["train"]
    assert metrics["chosen_reward"].item() == pytest.approx(rewards["rewards/chosen"][0], abs=1e-5)
    assert metrics["accuracy_mean"].item() == pytest.approx(rewards["rewards/accuracies"][0])


@pytest.mark.parametrize(("loss_type", "name"), [("nll", "sft"), ("dft", "sft_is")])
def test_sft(loss_type, name):
    b = batch(0)
    fake = trainer(
        args=SimpleNamespace(loss_type=loss_type, average_tokens_across_devices=False),
        compute_loss_func=None,
        label_smoother=None,
    )
    inputs = {"attention_mask": torch.ones(ROWS, WIDTH), "labels": None}
    model = model_outputs(b["logprob"], b["action_mask"])
    expected = trl_trainer("SFT").compute_loss(fake, model, inputs)
    assert_equal(ours(name, b), expected, b)
