"""Group operators against numbers worked out by hand, and what order and masks may not change."""

import math
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithm.batches import experience
from trinity.algorithm import ADVANTAGE_FN

GROUP_OPERATORS = [n for n in ADVANTAGE_FN.names() if not ADVANTAGE_FN.get(n).compute_in_trainer()]


def advantages(name, exps, **args):
    """Advantage of each kept experience by its id, and metrics."""
    kept, metrics = ADVANTAGE_FN.get(name)(**args).process(exps)
    return {
        e.eid.uid: float(e.advantages.sum() / e.action_mask.sum().clamp(min=1)) for e in kept
    }, metrics


def of(name, rewards, **args):
    found, metrics = advantages(name, [experience(r, run=i) for i, r in enumerate(rewards)], **args)
    return list(found.values()), metrics


def test_operators_and_trainer_functions_are_told_apart():
    assert GROUP_OPERATORS == [
        "asymre",
        "gigpo",
        "grpo",
        "opmd",
        "rec",
        "reinforce",
        "step_wise_grpo",
    ]


def test_grpo_by_hand():
    found, metrics = of("grpo", [1.0, 0.0, 0.0, 3.0], epsilon=0.5)
    std = math.sqrt(6 / 3)
    assert found == pytest.approx([0, -1 / (std + 0.5), -1 / (std + 0.5), 2 / (std + 0.5)])
    assert metrics["group_advantages/reward_mean/mean"] == 1
    assert metrics["group_advantages/reward_std/max"] == pytest.approx(std)
    assert metrics["filtered_count"] == 0


def test_grpo_group_of_one_keeps_its_reward():
    assert of("grpo", [2.0], epsilon=1.0)[0] == [1.0]


def test_grpo_groups_are_tasks_found_by_id():
    exps = [
        experience(r, task=t, run=i)
        for i, (t, r) in enumerate([(0, 1.0), (1, 5.0), (0, 0.0), (1, 7.0)])
    ]
    found, metrics = advantages("grpo", exps, epsilon=0.0)
    half = 1 / math.sqrt(2)
    assert list(found.values()) == pytest.approx([half, -half, -half, half])
    assert metrics["group_advantages/reward_mean/min"] == 0.5
    assert metrics["group_advantages/reward_mean/max"] == 6


def test_grpo_std_of_the_batch():
    exps = [
        experience(r, task=t, run=i)
        for i, (t, r) in enumerate([(0, 1.0), (0, 0.0), (1, 5.0), (1, 6.0), (2, 3.0)])
    ]
    found, _ = advantages("grpo", exps, epsilon=0.0, std_cal_level="batch")
    std = math.sqrt((4 + 9 + 4 + 9) / 4)
    half = 0.5 / std
    assert list(found.values()) == pytest.approx([half, -half, -half, half, 3])
    with pytest.raises(ValueError, match="std_cal_level is 'run'"):
        ADVANTAGE_FN.get("grpo")(std_cal_level="run")


def test_grpo_threshold_drops_groups_without_signal():
    exps = [
        experience(r, task=t, run=i)
        for i, (t, r) in enumerate([(0, 1.0), (0, 1.0), (1, 1.0), (2, 0.0), (2, 1.0)])
    ]
    found, metrics = advantages("grpo", exps, std_threshold=1e-3)
    assert [uid.split("/")[1] for uid in found] == ["2", "2"]
    assert metrics["filtered_count"] == 3


def test_grpo_fills_dropped_places_with_copies():
    exps = [
        experience(r, task=t, run=i)
        for i, (t, r) in enumerate([(0, 1.0), (0, 1.0), (1, 0.0), (1, 1.0)])
    ]
    kept, metrics = ADVANTAGE_FN.get("grpo")(std_threshold=0.0, duplicate_experiences=True).process(
        exps
    )
    assert len(kept) == 4 and metrics["filtered_count"] == 2
    assert len({e.eid.uid for e in kept}) == 4
    assert {e.eid.tid for e in kept} == {"0/1"}
    kept[0].advantages[0] = 77
    assert all(e.advantages[0] != 77 for e in kept[1:])


def test_grpo_with_nothing_kept_makes_no_copies():
    exps = [experience(1.0, run=i) for i in range(2)]
    kept, _ = ADVANTAGE_FN.get("grpo")(std_threshold=0.0, duplicate_experiences=True).process(exps)
    assert kept == []


def test_grpo_rank_penalty_changes_mean_and_std_only():
    logprobs = [[-3.0, -3.0], [-1.0, -1.0], [-1.0, -1.0], [-2.0, -2.0]]
    rewards = [1.0, 3.0, 1.0, 2.0]
    exps = [experience(rewards[i], run=i, logprobs=p) for i, p in enumerate(logprobs)]
    found, _ = advantages("grpo", exps, rank_penalty=0.4, epsilon=0.0)
    shares = (0, 2.5 / 4, 2.5 / 4, 1 / 4)
    penalized = [r * (1 - share * 0.4) for r, share in zip(rewards, shares)]
    mean = sum(penalized) / 4
    std = math.sqrt(sum((p - mean) ** 2 for p in penalized) / 3)
    assert list(found.values()) == pytest.approx([(r - mean) / std for r in rewards])
    with pytest.raises(ValueError, match="needs logprobs"):
        of("grpo", [1.0, 0.0], rank_penalty=0.1)


def test_reinforce_is_the_reward():
    assert of("reinforce", [2.0, -1.0])[0] == [2, -1]


def test_token_level_rewards_stand_in_for_a_reward():
    exps = [
        experience(None, run=i, token_level_reward=rewards)
        for i, rewards in enumerate([[1.0, 2.0], [0.5, 0.0]])
    ]
    assert list(advantages("reinforce", exps)[0].values()) == [3, 0.5]
    assert list(advantages("step_wise_grpo", exps[:1], epsilon=0.0)[0].values()) == [3]


def test_opmd_baselines_by_hand():
    assert of("opmd", [1.0, 0.0, 2.0])[0] == pytest.approx([0, -1, 1])
    tau = 0.5
    baseline = tau * math.log((math.exp(2) + 1) / 2)
    found, _ = of("opmd", [1.0, 0.0], opmd_baseline="logavgexp", tau=tau)
    assert found == pytest.approx([1 - baseline, -baseline])
    assert of("opmd", [3.0])[0] == [3]
    with pytest.raises(ValueError, match="opmd_baseline is 'max'"):
        ADVANTAGE_FN.get("opmd")(opmd_baseline="max")


def test_opmd_log_mean_exp_is_safe_for_any_size():
    found, _ = of("opmd", [1e6, 1e6 - 1], opmd_baseline="logavgexp", tau=1e-3)
    assert found == pytest.approx([1e-3 * math.log(2), -1 + 1e-3 * math.log(2)], abs=1e-6)


def test_asymre_shifts_the_baseline():
    assert of("asymre", [1.0, 0.0])[0] == pytest.approx([0.6, -0.4])
    assert of("asymre", [1.0, 0.0], baseline_shift=0.25)[0] == pytest.approx([0.25, -0.75])
    assert of("asymre", [3.0])[0] == [3]


def test_rec_by_hand():
    assert of("rec", [1.0, 0.0, 0.0, 0.0])[0] == pytest.approx([0.75, -0.25, -0.25, -0.25])
    found, _ = of("rec", [1.0, 0.0], std_normalize=True, epsilon=0.5)
    assert found == pytest.approx([0.5, -0.5])
    assert of("rec", [3.0])[0] == [3]
    assert of("rec", [3.0], std_normalize=True, epsilon=0.5)[0] == [2]


def test_rec_balance_drops_surplus_failures():
    found, metrics = of("rec", [1.0, 0.0, 0.0, 0.0], drop="balance")
    assert sorted(found) == pytest.approx([-0.5, 0, 0, 0.5])
    assert found[0] == pytest.approx(0.5)
    assert metrics["group_advantages/dropped/mean"] == 2
    assert of("rec", [1.0, 1.0, 0.0], drop="balance")[1]["group_advantages/dropped/mean"] == 0
    assert of("rec", [1.0, 0.0, 0.0], drop="balance")[1]["group_advantages/dropped/mean"] == 1
    with pytest.raises(ValueError, match="drop is 'all'"):
        ADVANTAGE_FN.get("rec")(drop="all")


def trajectories():
    """Two runs of task 0 (2 steps, 1 step) with rewards 1 and 0, one run of task 1."""
    return [
        experience(9.0, task=0, run=0, step=0),
        experience(0.0, task=0, run=1, step=0),
        experience(1.0, task=0, run=0, step=1),
        experience(4.0, task=1, run=0, step=0),
    ]


def test_step_wise_grpo_gives_every_step_the_advantage_of_its_run():
    found, metrics = advantages("step_wise_grpo", trajectories(), epsilon=0.0)
    half = 1 / math.sqrt(2)
    assert list(found.values()) == pytest.approx([half, -half, half, 4])
    assert metrics["experience_count"] == 4
    assert metrics["filtered_count"] == 0
    assert metrics["skipped_group_ratio"] == 0


def test_step_wise_grpo_reads_the_last_step_wherever_it_stands():
    exps = trajectories()
    forward, _ = advantages("step_wise_grpo", exps)
    backward, _ = advantages("step_wise_grpo", exps[::-1])
    assert forward == pytest.approx(backward)


def test_step_wise_grpo_options():
    half = 1 / math.sqrt(2)
    found, _ = advantages("step_wise_grpo", trajectories(), epsilon=0.0, enable_step_norm=True)
    assert list(found.values()) == pytest.approx([half / 2, -half, half / 2, 4])
    found, metrics = advantages("step_wise_grpo", trajectories(), epsilon=0.0, std_threshold=0.0)
    assert len(found) == 3
    assert (metrics["filtered_count"], metrics["skipped_group_ratio"]) == (1, 0.5)
    same = [experience(2.0, task=2, run=run) for run in range(2)]
    found, metrics = advantages("step_wise_grpo", [*trajectories(), *same], std_threshold=0.0)
    assert len(found) == 3 and metrics["skipped_group_ratio"] == pytest.approx(2 / 3)
    std = math.sqrt(((1 - 5 / 3) ** 2 + (5 / 3) ** 2 + (4 - 5 / 3) ** 2) / 2)
    found, _ = advantages("step_wise_grpo", trajectories(), epsilon=0.0, std_cal_level="batch")
    assert list(found.values()) == pytest.approx([0.5 / std, -0.5 / std, 0.5 / std, 4])


def test_step_wise_grpo_counts_a_run_while_a_step_of_it_is_trained():
    exps = trajectories()
    exps[2].action_mask[:] = False
    found, _ = advantages("step_wise_grpo", exps, epsilon=0.0)
    half = 1 / math.sqrt(2)
    assert list(found.values()) == pytest.approx([half, -half, 0, 4])


def gigpo_steps():
    """Two runs of two steps; both start in state s, then one is in t and one in u."""
    rows = [(0, 0, "s", 0.0), (0, 1, "t", 1.0), (1, 0, "s", 0.5), (1, 1, "u", 0.0)]
    return [
        experience(None, run=run, step=step, info={"env_state_hash": state, "step_reward": reward})
        for run, step, state, reward in rows
    ]


def test_gigpo_by_hand():
    found, metrics = advantages("gigpo", gigpo_steps(), gamma=0.5, omega=2.0, epsilon=0.0)
    # episode returns 1 and 0.5; step returns in state s: 0.5 and 0.5, alone in t and u
    assert list(found.values()) == pytest.approx([0.25, 0.25, -0.25, -0.25])
    assert metrics["gigpo/episode_reward_mean/mean"] == 0.75
    assert metrics["gigpo/episode_reward_std/mean"] == pytest.approx(0.5 / math.sqrt(2))
    assert metrics["gigpo/anchor_groups_total"] == 3
    assert metrics["gigpo/anchor_groups_size_gt1"] == 1
    assert metrics["gigpo/anchor_group_hit_ratio"] == 0.5
    assert metrics["gigpo/mean_abs_A_E"] == 0.25
    assert metrics["gigpo/mean_abs_A_S"] == 0


def test_gigpo_step_part_and_norm():
    found, _ = advantages("gigpo", gigpo_steps(), gamma=1.0, omega=1.0, epsilon=0.0, fnorm="std")
    half = 1 / math.sqrt(2)
    assert list(found.values()) == pytest.approx([2 * half, half, -2 * half, -half])
    with pytest.raises(ValueError, match="fnorm is 'max'"):
        ADVANTAGE_FN.get("gigpo")(fnorm="max")


def test_gigpo_sparse_reward_is_the_last_one():
    exps = [
        experience(1.0, run=0, step=0, info={"env_state_hash": 1}),
        experience(3.0, run=0, step=1, info={}),
        experience(2.0, run=1, step=0, info={"env_state_hash": 1}),
    ]
    found, _ = advantages("gigpo", exps, epsilon=0.0)
    # episode returns 3 and 2; the first steps share a state with returns 3 and 2
    assert list(found.values()) == pytest.approx([1, 0.5, -1])


def test_gigpo_of_one_run_is_its_return_and_a_step_without_a_state_is_alone():
    steps = [{"step_reward": 2.0}, {}, {"step_reward": 1.0}]
    exps = [experience(None, step=step, info=info) for step, info in enumerate(steps)]
    exps[1].action_mask[:] = False
    found, metrics = advantages("gigpo", exps, epsilon=0.0)
    assert list(found.values()) == [3, 0, 3]
    assert metrics["gigpo/anchor_groups_total"] == metrics["gigpo/anchor_group_hit_ratio"] == 0


def test_gigpo_refuses_a_step_reward_that_is_not_finite():
    exps = gigpo_steps()
    exps[1].info["step_reward"] = float("nan")
    with pytest.raises(ValueError, match="0/0/0/1/0-1"):
        ADVANTAGE_FN.get("gigpo")().process(exps)


def batch_of(data):
    """A random batch of tasks and runs with ragged steps and masked rows, for any operator."""
    exps = []
    for task in range(data.draw(st.integers(1, 3))):
        for run in range(data.draw(st.integers(1, 5))):
            for step in range(data.draw(st.integers(1, 3))):
                reward = data.draw(st.sampled_from([0.0, 1.0, 0.1, -2.0, 1e6]))
                mask = data.draw(st.sampled_from([(True, True), (True, False), (False, False)]))
                info = {"env_state_hash": data.draw(st.integers(0, 2))}
                exps.append(
                    experience(reward, task, run, step, mask, logprobs=[-1.0, -0.5], info=info)
                )
    return exps


@pytest.mark.parametrize("name", GROUP_OPERATORS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_order_and_other_tasks_change_nothing(name, data):
    exps = batch_of(data)
    args = {"drop": "balance"} if name == "rec" else {}
    args |= {"rank_penalty": 0.3, "std_threshold": 0.1} if name == "grpo" else {}
    before, _ = advantages(name, deepcopy(exps), **args)
    shuffled, _ = advantages(name, deepcopy(data.draw(st.permutations(exps))), **args)
    assert shuffled == before
    if name == "gigpo":  # its step part compares states over the whole batch
        return
    alone, _ = advantages(name, [e for e in deepcopy(exps) if e.eid.task == 0], **args)
    assert alone == {uid: value for uid, value in before.items() if uid.startswith("0/0/")}


@pytest.mark.parametrize("name", GROUP_OPERATORS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_fully_masked_run_changes_nothing_whatever_its_reward(name, data):
    exps = batch_of(data)
    before, _ = advantages(name, deepcopy(exps))
    masked = [
        experience(reward, task=0, run=90 + i, mask=(False,), info={"env_state_hash": 0})
        for i, reward in enumerate([1e9, float("nan"), None])
    ]
    after, _ = advantages(name, masked + deepcopy(exps))
    for experience_ in masked:
        assert after.pop(experience_.eid.uid, 0.0) == 0.0
    assert after == before


@pytest.mark.parametrize("name", GROUP_OPERATORS)
def test_masked_rows_stay_with_their_group_and_go_with_it(name):
    def task(number, rewards):
        rows = [experience(r, task=number, run=i) for i, r in enumerate(rewards)]
        return [experience(1.0, task=number, run=9, mask=(False, False)), *rows]

    exps = [*task(0, [1.0, 0.0]), *task(1, [1.0, 1.0]), *task(2, [])]
    kept, metrics = ADVANTAGE_FN.get(name)().process(exps)
    assert kept == exps and metrics["filtered_count"] == 0
    if "std_threshold" in ADVANTAGE_FN.get(name).default_args():
        kept, metrics = ADVANTAGE_FN.get(name)(std_threshold=0.0).process(exps)
        assert kept == [*exps[:3], exps[-1]] and metrics["filtered_count"] == 3


@pytest.mark.parametrize("name", GROUP_OPERATORS)
@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused_by_name(name, reward):
    exps = [experience(1.0, run=0), experience(reward, run=1, suffix="bad")]
    with pytest.raises(ValueError, match="0/0/1/0/bad"):
        ADVANTAGE_FN.get(name)().process(exps)


@pytest.mark.parametrize("name", [n for n in GROUP_OPERATORS if n != "reinforce"])
def test_equal_rewards_of_any_size_give_no_signal(name):
    args = {"baseline_shift": 0.0} if name == "asymre" else {}
    found, _ = of(name, [1e6 + 0.1] * 7, **args)
    assert found == [0.0] * 7


@pytest.mark.parametrize("name", GROUP_OPERATORS)
def test_advantages_cover_trained_tokens_only_and_returns_equal_them(name):
    exps = [experience(float(i), run=i, mask=(True, False, True)) for i in range(3)]
    kept, _ = ADVANTAGE_FN.get(name)().process(exps)
    for e in kept:
        assert e.advantages.dtype == torch.float32
        assert e.advantages[1] == 0 and e.advantages[0] == e.advantages[2]
        assert torch.equal(e.returns, e.advantages) and e.returns is not e.advantages


@pytest.mark.parametrize("name", GROUP_OPERATORS)
def test_an_empty_batch_and_a_single_group_are_fine(name):
    fn = ADVANTAGE_FN.get(name)()
    assert fn.process([])[0] == []
    exps = [experience(1.0, run=0), experience(0.0, run=1)]
    whole, _ = fn.process(deepcopy(exps))
    group, _ = fn.calculate_group_advantage("0/0", exps)
    assert [e.advantages.tolist() for e in group] == [e.advantages.tolist() for e in whole]
