"""Advantages in the trainer: by hand, by brute force, and against the formulas veRL publishes.

The veRL functions below are written from its documentation of the formulas, loops and all.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithm.batches import experience
from trinity.algorithm import ADVANTAGE_FN, POLICY_LOSS_FN
from trinity.algorithm.advantage_fn.entropy_clip import expected_entropy_score
from trinity.algorithm.advantage_fn.returns import gae, rewards_on_actions
from trinity.algorithm.value_loss import value_loss

TRAINER_FUNCTIONS = [n for n in ADVANTAGE_FN.names() if ADVANTAGE_FN.get(n).compute_in_trainer()]


def random_batch(seed, num_rows=6, width=7, holes=True):
    """Rewards on the last trained token of each row; responses of any length."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(num_rows, width, generator=generator)

    length = torch.randint(1, width + 1, (num_rows,), generator=generator)
    mask = torch.arange(width) < length[:, None]
    if holes:
        mask &= torch.rand(num_rows, width, generator=generator) > 0.3
        mask[torch.arange(num_rows), length - 1] = True
    rewards = torch.zeros(num_rows, width)
    rewards[torch.arange(num_rows), length - 1] = torch.randn(num_rows, generator=generator)
    return {
        "action_mask": mask,
        "token_level_rewards": rewards,
        "group_id": torch.randint(0, 2, (num_rows,), generator=generator),
        "values": normal(),
        "old_logprob": -normal().abs(),
        "teacher_logprobs": -normal().abs(),
        "entropy": normal().abs(),
        "necs": normal(),
        "reward_baselines": torch.randn(num_rows, generator=generator),
    }


def batch_of(rewards, groups, **columns):
    """A batch of two tokens a row with the reward on the last one."""
    rewards = torch.tensor(rewards)
    return {
        "token_level_rewards": torch.stack([torch.zeros_like(rewards), rewards], dim=1),
        "action_mask": torch.ones(len(rewards), 2).bool(),
        "group_id": torch.tensor(groups),
        **columns,
    }


def per_row(name, batch, **args):
    advantages, returns, _ = ADVANTAGE_FN.get(name)(**args)(batch)
    assert torch.equal(advantages, returns)
    return advantages[:, -1].tolist()


# ---- by hand


def test_grpo_in_the_trainer_by_hand():
    batch = batch_of([1.0, 5.0, 0.0, 7.0, 3.0], [4, 9, 4, 9, 2])
    half = 1 / math.sqrt(2)
    assert per_row("grpo_verl", batch, epsilon=0.0) == pytest.approx([half, -half, -half, half, 3])


def test_rloo_by_hand():
    batch = batch_of([1.0, 0.0, 0.5, 7.0], [1, 1, 1, 2])
    assert per_row("rloo", batch) == pytest.approx([1 - 0.25, -0.75, 0, 7])


def test_opmd_and_asymre_in_the_trainer_equal_their_operators():
    rewards, groups = [1.0, 0.0, 0.25, 7.0, 2.0, 4.0], [1, 1, 1, 2, 3, 3]
    for trainer, operator, args in (
        ("opmd_verl", "opmd", {}),
        ("opmd_verl", "opmd", {"opmd_baseline": "logavgexp", "tau": 0.3}),
        ("asymre_verl", "asymre", {"baseline_shift": -0.2}),
        ("grpo_verl", "grpo", {"epsilon": 0.1}),
    ):
        exps = [experience(r, task=g, run=i) for i, (r, g) in enumerate(zip(rewards, groups))]
        ADVANTAGE_FN.get(operator)(**args).process(exps)
        expected = [float(e.advantages[0]) for e in exps]
        assert per_row(trainer, batch_of(rewards, groups), **args) == pytest.approx(expected)
    for wrong in ({"opmd_baseline": "max"}, {"tau": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ADVANTAGE_FN.get("opmd_verl")(**wrong)


def test_opmd_log_mean_exp_in_the_trainer_is_safe_for_any_size():
    args = {"opmd_baseline": "logavgexp", "tau": 1e-3}
    found = per_row("opmd_verl", batch_of([1e6, 1e6 - 1], [0, 0]), **args)
    assert found == pytest.approx([1e-3 * math.log(2), -1 + 1e-3 * math.log(2)], abs=1e-6)


def test_gae_by_hand():
    advantage, returns = gae(
        torch.tensor([[0.0, 9.0, 1.0]]),
        torch.tensor([[0.5, 7.0, 0.25]]),
        torch.tensor([[1, 0, 1]]).bool(),
        gamma=0.5,
        lam=0.5,
    )
    # the reward on the tool token belongs to token 0; time does not advance on it
    last = 1 - 0.25
    first = 9 + 0.5 * 0.25 - 0.5 + 0.25 * last
    assert advantage.tolist() == [pytest.approx([first, 0, last])]
    assert returns.tolist() == [pytest.approx([first + 0.5, 0, 1])]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.97, 0.0)])
def test_gae_equals_the_double_sum(gamma, lam):
    batch = random_batch(0)
    reward, value, mask = batch["token_level_rewards"], batch["values"], batch["action_mask"]
    found, _ = gae(reward, value, mask, gamma=gamma, lam=lam)
    for b in range(len(mask)):
        on = mask[b].nonzero()[:, 0].tolist()
        r, v = reward[b, on].tolist(), [*value[b, on].tolist(), 0.0]
        delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(on))]
        for i, t in enumerate(on):
            expected = sum((gamma * lam) ** (k - i) * delta[k] for k in range(i, len(on)))
            assert float(found[b, t]) == pytest.approx(expected, abs=1e-5)


def test_rewards_move_to_the_trained_token_before_them():
    rewards = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0]]).bool()
    assert rewards_on_actions(rewards, mask).tolist() == [[0, 6, 0, 4], [0, 0, 0, 0]]


def test_reinforce_plus_plus_counts_time_on_masked_tokens():
    batch = {
        "token_level_rewards": torch.tensor([[0.0, 0.0, 4.0], [0.0, 2.0, 0.0]]),
        "action_mask": torch.tensor([[1, 0, 1], [1, 1, 0]]).bool(),
    }
    advantages, returns, _ = ADVANTAGE_FN.get("reinforceplusplus")(gamma=0.5)(batch)
    assert returns.tolist() == [[1, 0, 4], [1, 2, 0]]
    std = math.sqrt((1 + 4 + 1 + 0) / 3)
    assert advantages.tolist() == [
        pytest.approx([-1 / std, 0, 2 / std], rel=1e-5),
        pytest.approx([-1 / std, 0, 0], rel=1e-5),
    ]


def test_remax_by_hand():
    batch = batch_of([1.0, 0.0], [0, 0], reward_baselines=torch.tensor([0.25, 0.75]))
    advantages, returns, _ = ADVANTAGE_FN.get("remax")()(batch)
    assert advantages.tolist() == [[0.75, 0.75], [-0.75, -0.75]]
    assert returns.tolist() == [[1, 1], [0, 0]]


def test_distillation_by_hand():
    student, teacher = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -1.0]])
    batch = batch_of([0.0], [0], old_logprob=student, teacher_logprobs=teacher)
    advantages, _, metrics = ADVANTAGE_FN.get("on_policy_distill")(kl_coef=0.5)(batch)
    assert advantages.tolist() == [[-1, 0.5]]
    assert metrics["kl/mean"] == pytest.approx(0.5)
    assert metrics["kl/std"] == pytest.approx(math.sqrt((1.5**2 + 1.5**2) / 1))
    assert metrics["advantages/mean"] == pytest.approx(-0.25)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd_by_hand(beta):
    s, t = math.log(0.8), math.log(0.1)
    batch = batch_of(
        [0.0], [0], old_logprob=torch.tensor([[s, s]]), teacher_logprobs=torch.tensor([[t, s]])
    )
    advantages, _, metrics = ADVANTAGE_FN.get("jsd")(lambda_coef=beta, kl_coef=2.0, chunk_size=1)(
        batch
    )
    middle = math.log((1 - beta) * 0.8 + beta * 0.1)
    expected = {0.0: s - t, 1.0: t - s}.get(beta, beta * (t - middle) + (1 - beta) * (s - middle))
    assert advantages.tolist() == [pytest.approx([-2 * expected, 0], abs=1e-6)]
    assert metrics["jsd/mean"] == pytest.approx(expected / 2, abs=1e-6)


def test_jsd_temperature_divides_both():
    batch = batch_of(
        [0.0],
        [0],
        old_logprob=torch.tensor([[-2.0, -1.0]]),
        teacher_logprobs=torch.tensor([[-4.0, -1.0]]),
    )
    advantages, _, _ = ADVANTAGE_FN.get("jsd")(lambda_coef=0.0, temperature=2.0)(batch)
    assert advantages.tolist() == [[-1, 0]]
    with pytest.raises(ValueError, match="lambda_coef is 2"):
        ADVANTAGE_FN.get("jsd")(lambda_coef=2.0)


def test_jsd_exact_gradient_is_the_policy_gradient_of_the_divergence():
    logits = torch.tensor([0.5, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    beta = 0.4
    p = logits.softmax(0)
    middle = (1 - beta) * p + beta * teacher
    jsd = (
        beta * (teacher * (teacher / middle).log()).sum()
        + (1 - beta) * (p * (p / middle).log()).sum()
    )
    [exact] = torch.autograd.grad(jsd, logits)
    student = logits.log_softmax(0)
    fn = ADVANTAGE_FN.get("jsd")(lambda_coef=beta, exact_gradient=True)
    advantages = -fn.divergence(student.detach()[None], teacher.log()[None])[0]
    surrogate = -(student.detach().exp() * advantages * student).sum()
    [gradient] = torch.autograd.grad(surrogate, logits)
    assert gradient.tolist() == pytest.approx(exact.tolist())


def entropy_batch():
    """Four tokens with S = p (H + log p), one of them far below; all in one row of A < 0."""
    p = torch.tensor([[0.5, 0.5, 0.5, 0.9], [0.5, 0.5, 0.5, 0.9]])
    entropy = torch.tensor([[0.7, 0.7, 0.7, 0.0], [0.7, 0.7, 0.7, 0.0]])
    return {
        "token_level_rewards": torch.tensor([[0.0, 0, 0, 0], [0.0, 0, 0, 1]]),
        "action_mask": torch.ones(2, 4).bool(),
        "group_id": torch.tensor([0, 0]),
        "old_logprob": p.log(),
        "entropy": entropy,
    }


def test_clipb_drops_far_tokens_of_negative_advantage():
    batch = entropy_batch()
    fn = ADVANTAGE_FN.get("clipb")(mu=1.0)
    advantages, _, _ = fn(batch)
    mask, metrics = fn.loss_mask(batch, advantages)
    assert mask.tolist() == [[True, True, True, False], [True, True, True, True]]
    score = [0.5 * (0.7 + math.log(0.5)), 0.9 * math.log(0.9)]
    mean = (3 * score[0] + score[1]) / 4
    assert metrics["ES"] == pytest.approx(mean, abs=1e-6)
    assert metrics["varS"] == pytest.approx(3 / 16 * (score[0] - score[1]) ** 2, rel=1e-4)
    assert metrics["frac_clipped"] == pytest.approx(1 / 8)
    assert metrics["frac_clipped_neg"] == pytest.approx(1 / 4)
    assert metrics["frac_clipped_pos"] == 0


def test_clipb_reads_the_policy_that_sampled_and_keeps_all_without_spread():
    batch = entropy_batch()
    fn = ADVANTAGE_FN.get("clipb")(mu=1.0)
    advantages, _, _ = fn(batch)
    flat = {
        **batch,
        "rollout_log_probs": torch.full((2, 4), -0.5),
        "entropy": torch.full((2, 4), 0.7),
    }
    mask, _ = fn.loss_mask(flat, advantages)
    assert mask.all()


def test_clipv_drops_the_worst_up_to_its_share():
    batch = entropy_batch()
    batch["necs"] = torch.tensor([[0.0, 1.0, 2.0, 0.0], [9.0, 0, 0, 0]])
    advantages, _, _ = ADVANTAGE_FN.get("clipv")()(batch)
    free = ADVANTAGE_FN.get("clipv")(mu=0.1, max_frac=1.0)
    mask, metrics = free.loss_mask(batch, advantages)
    assert mask.tolist() == [[True, False, False, True], [True] * 4]
    assert metrics["frac_clipped"] == pytest.approx(2 / 8)
    spread = math.sqrt(metrics["varD"])
    drain = 2 - 0.5 * (0.7 + math.log(0.5))
    for mu, num_dropped in ((0.99 * drain / spread, 1), (1.01 * drain / spread, 0)):
        mask, _ = ADVANTAGE_FN.get("clipv")(mu=mu, max_frac=1.0).loss_mask(batch, advantages)
        assert int((~mask).sum()) == num_dropped
    for max_frac in (0.2, 1e-4):
        bounded = ADVANTAGE_FN.get("clipv")(mu=0.1, max_frac=max_frac)
        mask, _ = bounded.loss_mask(batch, advantages)
        assert mask.tolist() == [[True, True, False, True], [True] * 4]


def test_expected_entropy_score_predicts_the_change_of_entropy():
    logits = torch.tensor([1.0, 0.2, -0.5, 0.0], dtype=torch.float64)

    def entropy(z):
        return -(z.softmax(0) * z.log_softmax(0)).sum()

    p, logp = logits.softmax(0), logits.log_softmax(0)
    score = p * (entropy(logits) + logp)
    expected = float(expected_entropy_score(logits))
    assert expected == pytest.approx(float((p * score).sum()))
    k, eta = 1, 1e-4
    step = eta * (torch.nn.functional.one_hot(torch.tensor(k), 4) - p)
    change = float(entropy(logits + step) - entropy(logits))
    assert change == pytest.approx(-eta * (float(score[k]) - expected), rel=1e-2)


# ---- the formulas that veRL publishes, token by token


def verl_whiten(values, mask):
    kept = values[mask]
    return (values - kept.mean()) / torch.sqrt(kept.var() + 1e-8) * mask


def verl_gae(rewards, values, mask, gamma, lam):
    advantages = torch.zeros_like(rewards)
    for b in range(len(rewards)):
        running, next_value = 0.0, 0.0
        for t in reversed(range(rewards.shape[1])):
            if mask[b, t]:
                delta = rewards[b, t] + gamma * next_value - values[b, t]
                running = delta + gamma * lam * running
                next_value = values[b, t]
            advantages[b, t] = running
    return verl_whiten(advantages, mask), advantages + values


@pytest.mark.parametrize("seed", range(3))
def test_ppo_advantage_equals_verl(seed):
    batch = random_batch(seed)
    mask = batch["action_mask"]
    advantages, returns, _ = ADVANTAGE_FN.get("ppo")(gamma=0.95, lam=0.9)(batch)
    expected, expected_returns = verl_gae(
        batch["token_level_rewards"], batch["values"], mask, 0.95, 0.9
    )
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(returns[mask], expected_returns[mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_equals_verl(gamma):
    batch = random_batch(5, holes=False)
    rewards, mask = batch["token_level_rewards"], batch["action_mask"]
    returns = torch.zeros_like(rewards)
    for b in range(len(rewards)):
        running = 0.0
        for t in reversed(range(rewards.shape[1])):
            running = rewards[b, t] + gamma * running
            returns[b, t] = running
            running = running * mask[b, t]
    advantages, found, _ = ADVANTAGE_FN.get("reinforceplusplus")(gamma=gamma)(batch)
    torch.testing.assert_close(advantages, verl_whiten(returns, mask), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[mask], returns[mask], atol=1e-5, rtol=1e-5)


def test_remax_equals_verl():
    batch = random_batch(6)
    rewards, mask = batch["token_level_rewards"], batch["action_mask"]
    returns = (rewards * mask).flip(1).cumsum(1).flip(1)
    expected = (returns - batch["reward_baselines"][:, None]) * mask
    advantages, _, _ = ADVANTAGE_FN.get("remax")()(batch)
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=1e-5)


def test_ppo_policy_and_value_loss_equal_verl():
    generator = torch.Generator().manual_seed(7)
    old = -torch.randn(5, 6, generator=generator).abs()
    new = old + torch.randn(5, 6, generator=generator)
    advantages = torch.randn(5, 6, generator=generator)
    mask = torch.rand(5, 6, generator=generator) > 0.3
    ratio = torch.exp(new - old)
    losses = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
    losses = torch.where(advantages < 0, torch.min(losses, -advantages * 3.0), losses)
    loss, metrics = POLICY_LOSS_FN.get("ppo")(clip_range_high=0.28)(new, old, mask, advantages)
    assert float(loss) == pytest.approx(float(losses[mask].mean()), abs=1e-5)
    clipped = (-advantages * ratio.clamp(0.8, 1.28) > -advantages * ratio).float()
    assert float(metrics["pg_clipfrac"]) == pytest.approx(float(clipped[mask].mean()), abs=1e-5)
    assert float(metrics["ppo_kl"]) == pytest.approx(float((old - new)[mask].mean()), abs=1e-5)

    clipped_values = torch.max(torch.min(new, old + 0.5), old - 0.5)
    errors = torch.max((new - advantages) ** 2, (clipped_values - advantages) ** 2)
    found, _ = value_loss(new, old, advantages, mask, cliprange_value=0.5)
    assert float(found) == pytest.approx(0.5 * float(errors[mask].mean()), abs=1e-5)


# ---- what may not change them


@pytest.mark.parametrize("name", TRAINER_FUNCTIONS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), data=st.data())
def test_order_masked_rows_and_padding_change_nothing(name, seed, data):
    batch = random_batch(seed)
    num_rows, width = batch["action_mask"].shape
    fn = ADVANTAGE_FN.get(name)()
    before, returns, _ = fn(batch)
    kept, _ = fn.loss_mask(batch, before)
    order = data.draw(st.permutations(range(num_rows + 2)))
    extra = data.draw(st.integers(0, 2))
    moved = {}
    for column, value in batch.items():
        garbage = float("nan") if value.is_floating_point() else 0
        shape = (num_rows + 2, *([width + extra] if value.ndim == 2 else []))
        wide = torch.full(shape, garbage, dtype=value.dtype)
        wide[:num_rows, *([slice(width)] if value.ndim == 2 else [])] = value
        if column == "token_level_rewards":
            wide[:num_rows, width:] = 0
        moved[column] = wide[order]
    after, after_returns, _ = fn(moved)
    after_kept, _ = fn.loss_mask(moved, after)
    back = torch.tensor(order).argsort()
    for found, expected in ((after, before), (after_returns, returns)):
        torch.testing.assert_close(found[back][:num_rows, :width], expected, atol=1e-5, rtol=1e-5)
        assert found[back][num_rows:].abs().sum() == 0
    assert torch.equal(after_kept[back][:num_rows, :width], kept)
    assert (before[~batch["action_mask"]] == 0).all()
    assert (returns[~batch["action_mask"]] == 0).all()


@pytest.mark.parametrize(
    "name", ["ppo", "reinforceplusplus", "remax", "rloo", "grpo_verl", "opmd_verl", "asymre_verl"]
)
def test_a_nan_reward_is_refused_by_row(name):
    batch = random_batch(0)
    batch["token_level_rewards"][3, 0] = float("nan")
    with pytest.raises(ValueError, match=r"\[3\]"):
        ADVANTAGE_FN.get(name)()(batch)


@pytest.mark.parametrize("name", ["rloo", "grpo_verl", "opmd_verl"])
def test_equal_rewards_of_any_size_give_no_signal(name):
    assert per_row(name, batch_of([1e6] * 7, [3] * 7)) == [0.0] * 7


def test_functions_say_what_they_require():
    assert ADVANTAGE_FN.get("ppo").requires == ("values",)
    assert ADVANTAGE_FN.get("clipv").requires == ("old_logprob", "entropy", "necs")
    assert ADVANTAGE_FN.get("rloo").requires == ()
