import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.backends.process_ranks import rank_group
from tests.trainer.backends.steps import GRPO, assert_same, grpo, rows
from tests.trainer.backends.test_torch_checkpoint import state_of
from tests.trainer.backends.test_torch_engine import plain_outputs, settings
from tests.trainer.toy import groups, model_folder
from trinity.algorithm.policy_loss_fn.base import PolicyLossFn
from trinity.checkpoint.convert import convert
from trinity.common.models.utils import load_fsdp_state_dict_from_verl_checkpoint
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.rank_group import RankGroup, writing_turns
from trinity.trainer.backends.torch.sequence_parallel import check_heads
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective
from trinity.trainer.split import split_rows

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("world_size", "shares_rows", "tied", "gathers_once"),
    [
        (2, 1, True, False),
        (4, 1, False, True),
        (2, 2, False, False),
        (2, 2, True, True),  # in several passes
        (4, 2, True, True),
        (4, 4, True, True),
    ],
)
async def test_ranks_compute_what_one_process_does(
    tmp_path, world_size, shares_rows, tied, gathers_once
):
    folder = model_folder(tmp_path / "model", tie_word_embeddings=tied)
    # At Adam's usual eps a weight whose gradients are nearly 0 moves by the sign of their rounding.
    optimizer = OptimizerSettings(lr=1e-3, clip_grad=1.0, eps=1e-6)
    given = settings(folder, micro_batches=MicroBatchRule(max_tokens=80), optimizer=optimizer)
    single = TorchTrainEngine(given)
    await single.prepare()
    given = replace(
        given,
        sequence_parallel=shares_rows,
        optimizer_offload=not tied,
        gathers_once=gathers_once,
        gradient_checkpointing=shares_rows == 2,
        save_strategy="single_thread" if tied else "unrestricted",
    )
    wanted = await grpo(single, range(3))
    with rank_group(given, world_size) as group:
        await group.prepare()
        own = await grpo(group, range(3))
        assert_same(own, wanted, 5e-6)
        for name in ("actor/final_loss", "actor/grad_norm"):
            for found, alone in zip(own, wanted, strict=True):
                assert found[name] == pytest.approx(alone[name], rel=1e-6, abs=1e-6), name
        found = await group.forward(rows(7), "actor", True)
        alone = await single.forward(rows(7), "actor", True)
        found |= {"ref": (await group.forward(rows(7), "ref"))["logprob"]}
        alone |= {"ref": (await single.forward(rows(7), "ref"))["logprob"]}
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)
        await group.save(tmp_path / "global_step_3", True)
        await group.wait_saved()
        await group.close()
    weights = load_fsdp_state_dict_from_verl_checkpoint(tmp_path / "global_step_3" / "actor")
    for name, master in single._trained("actor").optimizer.weights.masters.items():
        torch.testing.assert_close(weights[name], master.detach(), atol=1e-6, rtol=1e-6)
    files = {path.name for path in (tmp_path / "global_step_3" / "actor").iterdir()}
    last = world_size - 1
    assert {f"{k}_world_size_{world_size}_rank_{last}.pt" for k in ("model", "optim")} <= files


class BestTokens(PolicyLossFn):
    """No sum over rows: only tokens above the batch's own median are trained."""

    def __call__(self, logprob, action_mask):
        kept = action_mask & (logprob.detach() > logprob.detach()[action_mask].median())
        return -(logprob * kept).sum() / kept.sum(), {"kept": kept.sum().float()}


@pytest.mark.parametrize("gathers_once", [False, True])
async def test_a_rank_without_rows_takes_part_in_a_loss_of_two_passes(tmp_path, gathers_once):
    given = settings(model_folder(tmp_path / "model"), gathers_once=gathers_once)
    batch = TrainBatch.from_experiences(groups(1, 1, seed=3))
    objective = Objective(BestTokens())
    assert not objective.adds_up(batch)
    single = TorchTrainEngine(given)
    await single.prepare()
    wanted = await single.forward_backward(batch, objective) | await single.optim_step()
    with rank_group(given, 2) as group:
        await group.prepare()
        async with asyncio.timeout(400):
            found = await group.forward_backward(batch, objective) | await group.optim_step()
    assert_same([found], [wanted], 5e-6)


async def test_a_batch_without_a_trained_token_changes_nothing_in_ranks_too(tmp_path):
    given = settings(model_folder(tmp_path / "model"))
    batch = TrainBatch.from_experiences(groups(2, 2))
    batch = batch.with_columns(action_mask=torch.zeros_like(batch["action_mask"]))
    single = TorchTrainEngine(given)
    await single.prepare()
    wanted = await single.forward_backward(batch, GRPO) | await single.optim_step()
    with rank_group(given, 2) as group:
        await group.prepare()
        found = await group.forward_backward(batch, GRPO) | await group.optim_step()
    assert found == wanted
    assert wanted["actor/grad_norm"] == wanted["actor/final_loss"] == 0


async def test_gradients_wait_for_a_last_pass_that_has_none_of_its_own(tmp_path):
    """The last row of either rank is clipped; gradients of the first are added up in its pass."""
    given = settings(model_folder(tmp_path / "model"), gathers_once=True)
    given = replace(given, micro_batches=MicroBatchRule(max_rows=1), balances_ranks=False)
    batch = TrainBatch.from_experiences(groups(4, 1))
    clipped = batch["old_logprob"].clone()
    clipped[1::2] -= 9.0  # the second row of either rank
    advantages = batch["advantages"].abs() + 0.1
    batch = batch.with_columns(old_logprob=clipped, advantages=advantages)
    objective = Objective.from_names("ppo")
    single = TorchTrainEngine(given)
    await single.prepare()
    with rank_group(given, 2) as group:
        await group.prepare()
        for _ in range(2):
            wanted = await single.forward_backward(batch, objective) | await single.optim_step()
            found = await group.forward_backward(batch, objective) | await group.optim_step()
            assert wanted["actor/grad_norm"] > 0
            assert_same([found], [wanted], 5e-6)


async def test_a_checkpoint_of_four_ranks_goes_on_with_two_and_with_one(tmp_path):
    folder = model_folder(tmp_path / "model")
    given = settings(folder, micro_batches=MicroBatchRule(max_tokens=80))
    path = tmp_path / "global_step_2"
    with rank_group(given, 4) as group:
        await group.prepare()
        await grpo(group, range(2))
        await group.save(path)
        await group.wait_saved()
        wanted = await grpo(group, range(2, 4))
    with rank_group(given, 2) as group:
        await group.prepare()
        await group.load(path)
        assert_same(await grpo(group, range(2, 4)), wanted, 5e-6)
    single = TorchTrainEngine(given)
    await single.prepare()
    await single.load(path)
    assert convert(path).status == "converted"
    model = AutoModelForCausalLM.from_pretrained(path / "actor" / "huggingface")
    logprob = (await single.forward(rows(7)))["logprob"]
    with torch.no_grad():
        plain = plain_outputs(model, rows(7))["logprob"]
    torch.testing.assert_close(plain, logprob, atol=1e-5, rtol=1e-5)
    assert_same(await grpo(single, range(2, 4)), wanted, 5e-6)


async def test_float32_masters_of_bfloat16_weights_go_from_one_process_to_two_and_back(tmp_path):
    given = settings(model_folder(tmp_path / "model"), dtype="bfloat16")
    single = TorchTrainEngine(given)
    await single.prepare()
    await grpo(single, range(2))
    await single.save(tmp_path / "global_step_2")
    await single.wait_saved()
    with rank_group(given, 2) as group:
        await group.prepare()
        await group.load(tmp_path / "global_step_2")
        await group.save(tmp_path / "global_step_3")
        await group.wait_saved()
    again = TorchTrainEngine(given)
    await again.prepare()
    await again.load(tmp_path / "global_step_3")
    wanted, found = state_of(single), state_of(again)
    embedding = wanted["model.embed_tokens.weight"]
    assert not torch.equal(embedding, embedding.bfloat16().float())
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert await grpo(again, range(2, 4)) == await grpo(single, range(2, 4))


def test_rows_are_split_by_groups_and_balanced():
    batch = rows(0)
    trained = batch["action_mask"].any(dim=1).nonzero().flatten().tolist()
    parts = split_rows(batch, 3)
    assert sorted(row for part in parts for row in part) == trained
    loads = [int(batch.lengths[part].sum()) for part in parts]
    assert max(loads) < 1.5 * min(loads)
    uneven = split_rows(batch, 3, balances=False)
    assert sorted(row for part in uneven for row in part) == trained


def test_writers_of_a_checkpoint_take_turns():
    hosts = ["a", "a", "b"]
    assert writing_turns("unrestricted", hosts) == [[0, 1, 2]]
    assert writing_turns("single_node", hosts) == [[0, 1], [2]]
    assert writing_turns("single_process", hosts) == [[0], [1], [2]]
    assert writing_turns("single_thread", hosts) == [[0], [1], [2]]


class Writing:
    """A rank that only notes how many write at the same time."""

    now, most = 0, 0

    def __init__(self, host: str) -> None:
        self._host = host

    async def address(self) -> str:
        return f"{self._host}:1"

    async def nothing(self, *args: object) -> None: ...

    join = hold_states = begin_checkpoint = finish_checkpoint = nothing

    async def write_part(self, path: object) -> None:
        Writing.now += 1
        Writing.most = max(Writing.most, Writing.now)
        await asyncio.sleep(0.01)
        Writing.now -= 1


@pytest.mark.parametrize(
    ("strategy", "at_once", "threads"),
    [
        ("unrestricted", 4, 4),
        ("single_node", 2, 4),
        ("single_process", 1, 4),
        ("single_thread", 1, 1),
    ],
)
async def test_each_save_strategy_bounds_who_writes_at_once(strategy, at_once, threads):
    given = settings("model", save_strategy=strategy)
    Writing.most = 0
    group = RankGroup([Writing(host) for host in "aabb"], given)
    await group.prepare()
    await group.save("job/global_step_1")
    await group.wait_saved()
    assert Writing.most == at_once
    assert TorchTrainEngine(given)._writer._num_threads == threads


def test_heads_that_ranks_cannot_share_are_refused_with_the_numbers():
    check_heads(9, 3, 3)
    check_heads(8, 2, 4)
    with pytest.raises(ValueError, match=r"2 ranks share .* 9 attention heads and 3 key heads"):
        check_heads(9, 3, 2)
