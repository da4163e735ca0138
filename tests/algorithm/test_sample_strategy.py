import math

import pytest
import torch

from tests.algorithm.batches import experience
from trinity.algorithm import SAMPLE_STRATEGY
from trinity.common.experience import Experience


class ListReader:
    """A reader over a list; gives what is left when less than asked is there."""

    def __init__(self, exps: list[Experience]) -> None:
        self.exps, self.offset, self.asked = exps, 0, []

    async def read(self, batch_size=None, **kwargs) -> list[Experience]:
        self.asked.append((batch_size, kwargs))
        if self.offset >= len(self.exps):
            raise StopAsyncIteration
        found = self.exps[self.offset : self.offset + batch_size]
        self.offset += len(found)
        return found

    def state_dict(self) -> dict:
        return {"offset": self.offset}

    def load_state_dict(self, state: dict) -> None:
        self.offset = state["offset"]


def rollouts(*versions, reward=1.0):
    return [
        experience(
            reward + i,
            task=i // 2,
            run=i,
            info={"model_version": v},
            prompt_text="q",
            response_text=f"a{i}",
        )
        for i, v in enumerate(versions)
    ]


async def test_default_reads_a_batch_and_describes_it():
    reader = ListReader(rollouts(2, 4, 3, 3, 9))
    exps, metrics, rows = await SAMPLE_STRATEGY.get("default")(reader, 4).sample(step=5)
    assert len(exps) == 4
    assert metrics["sample/task_count"] == 2
    assert metrics["sample/model_version/mean"] == 3
    assert metrics["sample/model_version_drift/max"] == 5 - 1 - 2
    assert metrics["sample/model_version_drift/min"] == 0
    assert metrics["time/read_experience"] >= 0
    assert [row["response"] for row in rows] == ["a3", "a0"]
    assert rows[0] == {"reward": 4.0, "prompt": "q", "response": "a3"}


async def test_a_batch_with_one_reward_shows_it_once():
    reader = ListReader([experience(None), experience(2.0, run=1)])
    _, _, rows = await SAMPLE_STRATEGY.get("default")(reader, 2).sample(1)
    assert [row["reward"] for row in rows] == [2.0]


async def test_state_comes_back():
    reader = ListReader(rollouts(0, 0, 0, 0))
    strategy = SAMPLE_STRATEGY.get("default")(reader, 2)
    await strategy.sample(1)
    state = strategy.state_dict()
    fresh = SAMPLE_STRATEGY.get("default")(ListReader(rollouts(0, 0, 0, 0)), 2)
    fresh.load_state_dict(state)
    exps, _, _ = await fresh.sample(2)
    assert [e.eid.run for e in exps] == [2, 3]


async def test_the_end_of_the_data_is_passed_on():
    with pytest.raises(StopAsyncIteration):
        await SAMPLE_STRATEGY.get("default")(ListReader([]), 2).sample(1)


def test_warmup_is_an_old_name():
    with pytest.warns(UserWarning, match="'default'"):
        SAMPLE_STRATEGY.get("warmup")(ListReader([]), 2)


async def test_staleness_asks_for_recent_versions_and_drops_older_ones():
    reader = ListReader(rollouts(7, 6, 9, 8, 7, 8))
    strategy = SAMPLE_STRATEGY.get("staleness_control")(reader, 3, max_staleness=2)
    exps, metrics, _ = await strategy.sample(step=10)
    assert reader.asked[0] == (3, {"min_model_version": 7, "step": 10})
    assert [e.info["model_version"] for e in exps] == [7, 9, 8]
    assert metrics["sample/stale_dropped"] == 1


async def test_staleness_is_that_of_the_oldest_trained_token():
    exps = rollouts(9, 9)
    exps[0].token_versions = torch.tensor([3, 9])
    exps[1].token_versions = torch.tensor([3, 9])
    exps[1].action_mask = torch.tensor([False, True])
    strategy = SAMPLE_STRATEGY.get("staleness_control")(ListReader(exps), 2, max_staleness=1)
    found, metrics, _ = await strategy.sample(step=10)
    assert found == [exps[1]]
    assert metrics["sample/model_version/min"] == 9


async def test_staleness_bounds_are_kept_between_whole_versions():
    reader = ListReader(rollouts(7, 8, 9))
    strategy = SAMPLE_STRATEGY.get("staleness_control")(reader, 1, max_staleness=1.5)
    assert [e.info["model_version"] for e in (await strategy.sample(step=10))[0]] == [8]


async def test_staleness_without_a_bound_keeps_all():
    strategy = SAMPLE_STRATEGY.get("staleness_control")(ListReader(rollouts(0, 1)), 2)
    assert strategy.default_args() == {"max_staleness": math.inf}
    assert len((await strategy.sample(step=1000))[0]) == 2


async def test_staleness_gives_the_rest_of_the_data_and_then_its_end():
    reader = ListReader(rollouts(1, 1, 9))
    strategy = SAMPLE_STRATEGY.get("staleness_control")(reader, 2, max_staleness=2)
    exps, metrics, _ = await strategy.sample(step=10)
    assert [e.info["model_version"] for e in exps] == [9]
    assert metrics["sample/stale_dropped"] == 2
    with pytest.raises(StopAsyncIteration):
        await strategy.sample(step=10)
    with pytest.raises(ValueError, match="max_staleness is -1"):
        SAMPLE_STRATEGY.get("staleness_control")(reader, 2, max_staleness=-1)


def mix(num_usual=8, num_expert=8, batch_size=5, **args):
    usual = ListReader(rollouts(*[1] * num_usual))
    expert = ListReader([experience(None, task=90 + i) for i in range(num_expert)])
    readers = {"sft_dataset": expert}
    return SAMPLE_STRATEGY.get("mix")(usual, batch_size, readers, **args), usual, expert


async def test_mix_reads_its_share_of_expert_data_and_marks_rows():
    strategy, usual, expert = mix(expert_data_ratio=0.5)
    exps, metrics, _ = await strategy.sample(step=4)
    assert (usual.offset, expert.offset) == (2, 3)
    assert [e.info["is_expert"] for e in exps] == [False] * 2 + [True] * 3
    assert all(e.info["step"] == 4 for e in exps)
    assert [(f.destination_field, f.data_type) for f in exps[0].custom_fields] == [
        ("expert_mask", torch.bool),
        ("step", torch.int32),
    ]
    assert exps[-1].reward == 0 and exps[-1].returns is None
    assert exps[-1].logprobs.tolist() == exps[-1].advantages.tolist() == [0, 0]
    assert exps[0].reward == 1
    assert metrics["sample/expert_count"] == 3


async def test_mix_may_be_all_or_nothing_expert():
    for ratio, offsets in ((0.0, (5, 0)), (1.0, (0, 5))):
        strategy, usual, expert = mix(expert_data_ratio=ratio)
        await strategy.sample(1)
        assert (usual.offset, expert.offset) == offsets


async def test_mix_keeps_the_state_of_both_readers():
    strategy, _, _ = mix()
    await strategy.sample(1)
    state = strategy.state_dict()
    assert state == {"usual_buffer": {"offset": 2}, "expert_buffer": {"offset": 3}}
    resumed, usual, expert = mix()
    resumed.load_state_dict(state)
    assert (usual.offset, expert.offset) == (2, 3)


def test_mix_names_the_buffer_that_is_missing():
    with pytest.raises(ValueError, match="'other'"):
        mix(sft_dataset_name="other")
    with pytest.raises(ValueError, match="expert_data_ratio is 2"):
        mix(expert_data_ratio=2)


async def test_a_row_marked_twice_has_its_fields_once():
    strategy, usual, _ = mix()
    await strategy.sample(1)
    usual.offset = 0
    exps, _, _ = await strategy.sample(2)
    assert [f.destination_field for f in exps[0].custom_fields] == ["expert_mask", "step"]
    assert exps[0].info["step"] == 2
