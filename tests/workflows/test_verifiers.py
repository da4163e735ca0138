"""A real `verifiers` environment as tasks, where the package is there (`make test-agents`)."""

import pytest

from tests.workflows.test_real_wrapper import run, sampled, wrapper
from trinity.buffer.rows import DataError, open_rows
from trinity.common.constants import StorageType

pytest.importorskip("verifiers.v1")

TASKSET = """
import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumConfig(vf.TasksetConfig):
    largest: int = 3


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[-1].content == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for n in range(1, self.config.largest + 1):
            data = SumData(prompt=f"{n}+{n}?", system_prompt="Add.", answer=str(2 * n))
            yield SumTask(data, self.config.task)
"""


@pytest.fixture
def taskset(tmp_path, monkeypatch):
    (tmp_path / "vf_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)


async def test_an_episode_is_trained_on_its_sampled_tokens(taskset):
    rows = open_rows("vf_sums?largest=4", storage_type=StorageType.VERIFIERS)
    assert len(rows) == 4 and rows[2]["prompt"].endswith("3+3?")
    model, ids = wrapper(["6", "7"], "chatml")
    found, _ = await run(model, repeat_times=2, raw=rows[2], workflow="verifiers_workflow")
    by_reward = sorted(found, key=lambda row: -row.reward)
    assert [row.reward for row in by_reward] == [0.5, 0.0]
    assert sorted(map(tuple, map(sampled, found))) == sorted(map(tuple, ids))
    first = by_reward[0]
    assert first.metrics["right"] == 0.5 and first.metrics["length"] == 1
    assert "Add." in first.prompt_text and "3+3?" in first.prompt_text


async def test_mistakes_are_named(taskset):
    with pytest.raises(DataError, match="vf_nothing"):
        open_rows("vf_nothing", storage_type=StorageType.VERIFIERS)
    with pytest.raises(DataError, match="largst"):
        open_rows("vf_sums?largst=4", storage_type=StorageType.VERIFIERS)
    model, _ = wrapper(["6"], "chatml", max_model_len=8, enable_prompt_truncation=False)
    raw = {"taskset": {"id": "vf_sums"}, "idx": 0}
    with pytest.raises(AssertionError, match="episode failed"):
        await run(model, raw=raw, workflow="verifiers_workflow")
