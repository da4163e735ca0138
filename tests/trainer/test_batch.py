"""What experiences become as a batch, and which rows go to which rank."""

import pytest
import torch

from tests.algorithm.batches import experience
from trinity.common.experience import CustomField, Experience
from trinity.trainer.backends.torch.microbatch import MicroBatchRule, plan_micro_batches
from trinity.trainer.batch import TrainBatch
from trinity.trainer.split import split_rows


def rows_of(*lengths: int, task: int = 0, prompt: int = 4) -> list[Experience]:
    return [
        Experience(
            eid={"task": task, "run": run},
            tokens=list(range(prompt + length)),
            prompt_length=prompt,
            reward=1.0,
        )
        for run, length in enumerate(lengths)
    ]


def test_the_reward_stands_on_the_last_trained_token():
    masks = [(1, 1, 1, 0), (1, 0), (0, 0)]
    exps = [experience(2.0, run=run, mask=mask) for run, mask in enumerate(masks)]
    found = TrainBatch.from_experiences(exps)["token_level_scores"]
    assert found.tolist() == [[0, 0, 2, 0], [2, 0, 0, 0], [0, 0, 0, 0]]


def test_selected_rows_are_as_wide_as_the_longest_of_them():
    batch = TrainBatch.from_experiences(rows_of(5, 2, 3)).with_columns(number=torch.arange(3))
    part = batch.select([2, 1])
    assert part["action_mask"].tolist() == [[True] * 3, [True, True, False]]
    assert part["number"].tolist() == [2, 1]
    assert part.response_lengths.tolist() == [3, 2]
    with pytest.raises(ValueError, match="number has 2 rows, the batch 3"):
        batch.with_columns(number=torch.arange(2))


def test_custom_fields_are_padded_to_the_longest():
    exps = rows_of(2, 2)
    for exp, bonus in zip(exps, ([1.0, 2.0], [3.0])):
        exp.info["bonus"] = bonus
        exp.custom_fields = [CustomField("bonus", "weight", torch.float32)]
    assert TrainBatch.from_experiences(exps)["weight"].tolist() == [[1, 2], [3, 0]]
    exps[1].custom_fields = []
    with pytest.raises(ValueError, match="must have the same"):
        TrainBatch.from_experiences(exps)


def test_a_group_too_large_for_a_rank_is_cut_and_masked_rows_go_to_none():
    exps = rows_of(10, 10, 10, 10, 10)
    exps[2].action_mask[:] = False
    batch = TrainBatch.from_experiences(exps)
    assert split_rows(batch, 2) == [[0, 1], [3, 4]]
    assert split_rows(batch, 1) == [[0, 1, 3, 4]]


def test_a_pair_of_which_one_answer_is_trained_stays_together():
    exps = rows_of(10, 10, 10, 10)
    exps[1].action_mask[:] = False
    pairs = {"pair_id": torch.tensor([0, 0, 1, 1]), "is_chosen": torch.tensor([1, 0, 1, 0]).bool()}
    batch = TrainBatch.from_experiences(exps).with_columns(**pairs)
    assert sorted(split_rows(batch, 2)) == [[0, 1], [2, 3]]


def preferences(*answers: tuple[int, int]) -> list[Experience]:
    """Preference pairs by the lengths of their answers."""
    return [
        Experience(eid={"task": task}, tokens=[1, 2], chosen=[3] * chosen, rejected=[4] * rejected)
        for task, (chosen, rejected) in enumerate(answers)
    ]


def test_a_pair_with_an_empty_answer_is_not_trained_on():
    batch = TrainBatch.from_experiences(preferences((3, 0), (2, 4)))
    assert batch["action_mask"].sum(dim=1).tolist() == [0, 0, 2, 4]
    planned = [micro.rows for micro in plan_micro_batches(batch, MicroBatchRule())]
    assert planned == [[2, 3]]
    assert TrainBatch.from_experiences(preferences((0, 2))).num_trained_tokens == 0
