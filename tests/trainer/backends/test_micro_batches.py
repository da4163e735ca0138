import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity.common.experience import EID, Experience
from trinity.trainer.backends.torch.microbatch import MicroBatchRule, plan_micro_batches
from trinity.trainer.batch import TrainBatch

PROMPT = 5


def batch_of(responses: list[list[int]]) -> TrainBatch:
    """A group for each list; prompts of 5 tokens, and responses of these lengths."""
    experiences = [
        Experience(
            eid=EID(batch=0, task=task, run=run),
            tokens=torch.arange(PROMPT + length),
            prompt_length=PROMPT,
            logprobs=torch.zeros(length),
            advantages=torch.ones(length),
            reward=1.0,
        )
        for task, lengths in enumerate(responses)
        for run, length in enumerate(lengths)
    ]
    return TrainBatch.from_experiences(experiences)


def packed_tokens(batch: TrainBatch, rows: list[int]) -> int:
    groups = {int(batch["group_id"][row]) for row in rows}
    return PROMPT * len(groups) + sum(int(batch.lengths[row]) - PROMPT for row in rows)


def test_groups_stay_whole_where_that_takes_no_more_micro_batches():
    batch = batch_of([[10] * 8] * 8)  # 85 packed tokens each
    plan = plan_micro_batches(batch, MicroBatchRule(max_tokens=200))
    assert [micro.rows for micro in plan] == [
        list(range(first, first + 16)) for first in (0, 16, 32, 48)
    ]


def test_groups_are_cut_where_whole_ones_would_leave_too_much_room():
    batch = batch_of([[10] * 8] * 6)
    plan = plan_micro_batches(batch, MicroBatchRule(max_tokens=120))  # whole: 6 of 85
    assert len(plan) == 5
    assert max(packed_tokens(batch, micro.rows) for micro in plan) <= 120


def test_micro_batches_are_about_as_large_as_each_other():
    batch = batch_of([[10] * 2] * 9)  # 25 each: 8 fit at once, and one would be left
    plan = plan_micro_batches(batch, MicroBatchRule(max_tokens=200))
    assert [len(micro.rows) for micro in plan] == [10, 8]


def test_as_many_rows_as_are_asked_for_go_together():
    batch = batch_of([[10] * 4])
    plan = plan_micro_batches(batch, MicroBatchRule(max_rows=2))
    assert [micro.rows for micro in plan] == [[0, 1], [2, 3]]
    assert not any(micro.is_idle for micro in plan)


def test_a_group_as_large_as_the_bound_is_whole():
    """Its prompt counts once."""
    batch = batch_of([[10, 10], [10, 10, 10]])  # 25 and 35
    plan = plan_micro_batches(batch, MicroBatchRule(max_tokens=35))
    assert [micro.rows for micro in plan] == [[0, 1], [2, 3, 4]]
    cut = plan_micro_batches(batch, MicroBatchRule(max_tokens=34))
    assert max(packed_tokens(batch, micro.rows) for micro in cut) <= 34


@given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(20, 150),
    st.none() | st.integers(1, 7),
    st.booleans(),
    st.data(),
)
def test_every_row_has_its_place_within_the_bounds(responses, max_tokens, max_rows, shares, data):
    batch = batch_of(responses)
    idle = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)))
    )
    rule = MicroBatchRule(max_tokens, max_rows)
    plan = plan_micro_batches(batch, rule, idle, shares)
    assert sorted(row for micro in plan for row in micro.rows) == list(range(len(batch)))
    for micro in plan:
        assert {bool(idle[row]) for row in micro.rows} == {micro.is_idle}
        assert max_rows is None or len(micro.rows) <= max_rows
        tokens = (
            packed_tokens(batch, micro.rows) if shares else int(batch.lengths[micro.rows].sum())
        )
        assert tokens <= max_tokens or len(micro.rows) == 1
