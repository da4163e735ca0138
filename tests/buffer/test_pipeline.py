import asyncio
import logging
import math
import threading

import pytest

from tests.buffer.samples import experience, group, tasks_of
from trinity.algorithm.advantage_fn.grpo import GRPOGroupAdvantage
from trinity.buffer import ExperiencePipeline
from trinity.buffer.operators import (
    EXPERIENCE_OPERATORS,
    ExperienceOperator,
    ExperienceOperatorV1,
    create_operators,
)
from trinity.buffer.reader.queue import QueueReader
from trinity.buffer.storage.queue import QueueStorage
from trinity.buffer.writer.queue import QueueWriter
from trinity.common.config.data_processor import OperatorConfig
from trinity.common.constants import SELECTOR_METRIC
from trinity.common.errors import DeadlineError
from trinity.common.experience import Experience


def operator(name: str, **args) -> ExperienceOperator:
    return create_operators([OperatorConfig(name=name, args=args)])[0]


def rewarded(rewards: dict[int, list[float | None]], **fields) -> list[Experience]:
    return [
        experience(task, run, reward=reward, **fields)
        for task, values in rewards.items()
        for run, reward in enumerate(values)
    ]


def test_reward_filter():
    kept, metrics = operator("reward_filter", threshold=0.5).process(
        rewarded({0: [0.4, 0.5], 1: [None, 1.0]})
    )
    assert [e.reward for e in kept] == [0.5, 1.0]
    assert metrics == {"filtered_count": 2}


def test_invalid_rewards():
    kept, _ = operator("invalid_reward_filter").process(
        rewarded({0: [None, math.nan, math.inf, 0.0]})
    )
    assert [e.reward for e in kept] == [0.0]


def test_groups_without_spread_are_dropped():
    kept, metrics = operator("reward_std_filter", threshold=0.1).process(
        rewarded({0: [1, 1], 1: [0, 1], 2: [0.5, 0.6], 3: [1]})
    )
    assert set(tasks_of(kept)) == {1}
    assert metrics["operator_filtered_count"] == 5
    assert metrics["origin_group_advantages/reward_std/max"] == 0.5


def test_dynamic_sampling_wants_partly_right_groups():
    exps = rewarded({0: [1, 1], 1: [0, 0], 2: [0, 1], 3: [1]})
    kept, metrics = operator("dapo_dynamic_sampling").process(exps)
    assert set(tasks_of(kept)) == {2}
    assert metrics == {"filtered_count": 5, "dropped_all_correct": 2, "dropped_all_wrong": 1}
    for e in exps:
        e.metrics["accuracy"] = 1.0 - (e.eid.run == 0 and e.eid.task == 0)
    kept, _ = operator("dapo_dynamic_sampling").process(exps)
    assert set(tasks_of(kept)) == {0}


def test_what_has_no_score_is_not_wrong_to_dynamic_sampling():
    exps = rewarded({0: [math.nan, 1, 1], 1: [None, 1], 2: [None, 0, 1], 3: [None]})
    kept, metrics = operator("dapo_dynamic_sampling").process(exps)
    assert set(tasks_of(kept)) == {2}
    assert metrics == {"filtered_count": 6, "dropped_all_correct": 2, "dropped_all_wrong": 0}


def test_cut_responses_are_masked():
    exps = group(2)
    exps[1].truncate_status = "response_truncated"
    kept, metrics = operator("mask_response_truncated").process(exps)
    assert [bool(e.action_mask.any()) for e in kept] == [True, False]
    assert metrics == {"masked_count": 1}


def test_rewards_are_shaped_step_by_step():
    steps = [
        {"stats_key": "scores.quality", "op_type": "ADD", "weight": 2},
        {"stats_key": "length", "op_type": "div"},
    ]
    exps = [experience(reward=1.0, info={"scores": {"quality": 0.5}, "length": 4})]
    [shaped], metrics = operator("reward_shaping_mapper", reward_shaping_configs=steps).process(
        exps
    )
    assert shaped.reward == 0.5
    assert metrics["reward_diff/mean"] == -0.5
    with pytest.raises(ValueError, match=r"'scores.quality' is not in the info"):
        operator("reward_shaping_mapper", reward_shaping_configs=steps).process(group(1))


def test_pass_rates_of_tasks():
    exps = []
    for index, rewards in enumerate([[1, 1, math.nan], [0, 1, None], [0, 0]]):
        place = {"taskset_id": index // 2, "index": 10 + index}
        exps += rewarded({index: rewards}, info={"task_index": place})
    _, metrics = operator("pass_rate_calculator").process(exps)
    assert metrics[SELECTOR_METRIC] == {
        0: {"indices": [10, 11], "values": [1.0, 0.5]},
        1: {"indices": [12], "values": [0.0]},
    }
    assert metrics["selection/valid_ratio"] == pytest.approx(1 / 3)
    assert metrics["selection/<1_ratio"] == pytest.approx(2 / 3)


def test_wrong_names_and_arguments_are_named():
    with pytest.raises(LookupError, match="Did you mean 'reward_filter'"):
        operator("reward_filtr")
    with pytest.raises(ValueError, match=r"'reward_filter'.*It takes: threshold"):
        operator("reward_filter", treshold=1)


def test_operators_have_the_auxiliary_models():
    made, *_ = create_operators([OperatorConfig(name="reward_filter", args={})])
    assert not made.auxiliary_models
    pipeline = ExperiencePipeline([made, GRPOGroupAdvantage()], QueueWriter(QueueStorage("out")))
    pipeline.set_auxiliary_models({"judge": ["client"]})
    assert made.auxiliary_models["judge"] == ["client"]


@EXPERIENCE_OPERATORS.register_module("test_halve")
class Halve(ExperienceOperatorV1):
    """Keeps every other experience, with coroutines."""

    log: list[str] = []  # noqa: RUF012

    async def prepare(self) -> None:
        self.log.append("prepared")

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict]:
        return exps[::2], {"halved": len(exps)}

    async def close(self) -> None:
        self.log.append("closed")


async def test_save_input_operators_advantage_output_in_this_order():
    raw, output = QueueStorage("raw"), QueueStorage("out")
    pipeline = ExperiencePipeline(
        [operator("invalid_reward_filter"), operator("test_halve"), GRPOGroupAdvantage()],
        QueueWriter(output),
        QueueWriter(raw),
    )
    await pipeline.prepare()
    exps = rewarded({0: [0.0, None, 1.0, 0.5, 0.2]})
    metrics = await pipeline.process(exps)
    await pipeline.close()
    await pipeline.close()
    assert len(await raw.get(9, 1)) == 5
    written = await output.get(9, 1)
    assert [e.reward for e in written] == [0.0, 0.5]
    assert [round(float(e.advantages[0]), 3) for e in written] == [-0.707, 0.707]
    assert await output.get(9, 1) is None
    assert metrics["experience_pipeline/experience_count"] == 2
    assert metrics["experience_pipeline/filtered_count"] == 3
    assert metrics["experience_pipeline/group_advantages/reward_mean/mean"] == 0.25
    assert metrics["experience_pipeline/time/Halve"] >= 0
    assert Halve.log == ["prepared", "closed"]


async def test_dropped_groups_count_though_copies_take_their_places():
    pipeline = ExperiencePipeline(
        [
            operator("invalid_reward_filter"),
            GRPOGroupAdvantage(std_threshold=0.0, duplicate_experiences=True),
        ],
        QueueWriter(QueueStorage("out")),
    )
    await pipeline.prepare()
    metrics = await pipeline.process(rewarded({0: [0.0, 1.0], 1: [1.0, 1.0, None]}))
    assert metrics["experience_pipeline/experience_count"] == 4
    assert metrics["experience_pipeline/filtered_count"] == 1 + 2


async def test_further_sources_are_added_to_a_step():
    live, ended, output = (QueueStorage(name) for name in ("live", "ended", "out"))
    await ended.acquire()
    await live.put(group(2, batch="live"))
    await ended.put(group(1, batch="ended"))
    await ended.release()
    inputs = {"live": QueueReader(live, timeout_s=0), "ended": QueueReader(ended, timeout_s=0)}
    pipeline = ExperiencePipeline([], QueueWriter(output), inputs=inputs)
    await pipeline.prepare()
    metrics = await pipeline.process(group(1))
    assert metrics["experience_pipeline/input/live"] == 2
    await live.put(group(1, batch="live"))
    await pipeline.process([])
    batches = [e.eid.batch for e in await output.get(5, 1)]
    assert batches == [1, "live", "live", "ended", "live"]


async def test_feedback_for_selectors_stands_under_its_own_name():
    pipeline = ExperiencePipeline(
        [operator("pass_rate_calculator")], QueueWriter(QueueStorage("out"))
    )
    await pipeline.prepare()
    place = {"taskset_id": 0, "index": 3}
    metrics = await pipeline.process([experience(info={"task_index": place})])
    assert metrics[SELECTOR_METRIC] == {0: {"indices": [3], "values": [1.0]}}


class Held(ExperienceOperator):
    """Holds something from `prepare` to `close`."""

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at, self.is_held = fails_at, False

    def prepare(self) -> None:
        self.is_held = True
        self._may_fail("prepare")

    def close(self) -> None:
        self.is_held = False
        self._may_fail("close")

    def _may_fail(self, at: str) -> None:
        if self.fails_at == at:
            raise ConnectionError(at)


@pytest.mark.parametrize("fails_at", ["prepare", "close"])
async def test_all_is_let_go_of_when_one_operator_fails(fails_at: str):
    operators = [Held("close" if fails_at == "close" else ""), Held(fails_at), Held()]
    output = QueueStorage("out")
    pipeline = ExperiencePipeline(operators, QueueWriter(output))
    with pytest.raises(ConnectionError, match=fails_at):
        await pipeline.prepare()
        await pipeline.close()
    await pipeline.close()
    assert not any(operator.is_held for operator in operators)


@pytest.mark.parametrize(
    ("info", "message"),
    [({"score": 0}, r"'score'.*0"), ({"score": "good"}, r"'score'.*'good'.*number")],
)
def test_a_statistic_that_can_not_shape_a_reward_is_named(info: dict, message: str):
    step = {"stats_key": "score", "op_type": "DIV"}
    with pytest.raises(ValueError, match=message):
        operator("reward_shaping_mapper", reward_shaping_configs=[step]).process(
            [experience(info=info)]
        )


class Waiting(ExperienceOperator):
    """Never ends, as if a judge did not answer."""

    async def process(self, exps):
        await asyncio.Event().wait()


class Blocking(ExperienceOperator):
    """Holds the event loop until it is told of."""

    def __init__(self) -> None:
        self.is_told = threading.Event()

    def process(self, exps):
        assert self.is_told.wait(60)
        return exps, {}


async def test_an_operator_that_never_ends_is_named_at_the_deadline():
    output = QueueWriter(QueueStorage("out"))
    pipeline = ExperiencePipeline([Waiting()], output, deadline_s=0.1)
    await pipeline.prepare()
    with pytest.raises(DeadlineError, match="for the operator Waiting during a step"):
        async with asyncio.timeout(60):
            await pipeline.process([experience()])
    await pipeline.close()


async def test_an_operator_that_blocks_is_told_while_it_does():
    """Nothing can end it but itself."""
    blocking = Blocking()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "operator Blocking" in record.getMessage():
                blocking.is_told.set()

    logger = logging.Logger("pipeline")
    logger.addHandler(Told())
    output = QueueWriter(QueueStorage("out"))
    pipeline = ExperiencePipeline([blocking], output, logger=logger, deadline_s=0.1)
    await pipeline.prepare()
    metrics = await pipeline.process([experience()])
    assert metrics["experience_pipeline/experience_count"] == 1
    await pipeline.close()
