"""Data that do not fill one step are refused before anything starts, in one sentence everywhere."""

import json

import pytest

from tests.common.config.files import DROP, with_edits
from trinity.buffer.first_step import first_step_problems, refuse_few_rows, refuse_few_tasks
from trinity.buffer.rows import DataError
from trinity.common.config import Config, derive

TASKSET = "buffer.explorer_input.taskset"
SOURCE = "buffer.trainer_input.experience_buffer"
SFT = {"mode": "train", "algorithm": {"algorithm_type": "sft"}, "buffer.train_batch_size": 4}


@pytest.fixture
def three(tmp_path):
    path = tmp_path / "three.jsonl"
    path.write_text("".join(json.dumps({"question": "?", "answer": "!"}) + "\n" for _ in range(3)))
    return str(path)


def filled(edits):
    return derive(Config.model_validate(with_edits(edits))).config


def found(edits):
    return [(p.key, f"{p.message} {p.fix}") for p in first_step_problems(filled(edits))]


def test_too_few_tasks(three):
    edits = {f"{TASKSET}.path": three}
    [(key, text)] = found(edits)
    assert key == "buffer.batch_size"
    with pytest.raises(DataError) as refused:
        refuse_few_tasks(filled(edits), 3)
    assert str(refused.value) == text
    assert "3 tasks are less than one step of 4 (buffer.batch_size)" in text


@pytest.mark.parametrize(
    "enough",
    [
        {"buffer.batch_size": 3},
        {"buffer.total_epochs": 2},
        {"buffer.total_steps": 1},
        {"mode": "bench"},
        {f"{TASKSET}.path": "owner/name"},
        {"data_processor.task_pipeline": {"operators": []}},
    ],
)
def test_enough_or_not_known(three, enough):
    assert found({f"{TASKSET}.path": three, **enough}) == []


def test_tasksets_are_counted_together(three):
    sets = [{"path": three}, {"path": three, "split": "train[:1]"}]
    assert found({TASKSET: DROP, "buffer.explorer_input.tasksets": sets}) == []
    sets[0]["split"] = "train[:2]"
    assert found({TASKSET: DROP, "buffer.explorer_input.tasksets": sets}) != []


def test_too_few_rows(three):
    edits = {**SFT, SOURCE: {"path": three}}
    [(key, text)] = found(edits)
    assert key == "buffer.train_batch_size"
    with pytest.raises(DataError) as refused:
        refuse_few_rows(filled(edits), 3)
    assert str(refused.value) == text
    assert found({**edits, f"{SOURCE}.total_epochs": 2}) == []
    assert found({**edits, "trainer.total_steps": 2}) == []


def test_what_an_explorer_still_writes_is_not_counted(three):
    source = {"path": three, "storage_type": "file"}
    assert found({"mode": "train", SOURCE: source, "buffer.train_batch_size": 4}) == []
