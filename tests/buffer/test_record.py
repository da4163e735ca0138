"""The readable copy of what goes into a queue in memory."""

import json
import logging
from pathlib import Path

import pytest

from tests.buffer.samples import group
from trinity.buffer import ExperiencePipeline
from trinity.buffer.operators import create_operators
from trinity.buffer.storage.queue import QueueStorage
from trinity.buffer.writer.queue import QueueWriter
from trinity.buffer.writer.record import RecordWriter
from trinity.common.config.data_processor import OperatorConfig


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_what_a_pipeline_writes_can_be_read(tmp_path: Path):
    path, storage = tmp_path / "buffer" / "experience_buffer.jsonl", QueueStorage("q")
    operators = create_operators([OperatorConfig(name="reward_filter", args={"threshold": 0.5})])
    pipeline = ExperiencePipeline(operators, QueueWriter(storage), record=RecordWriter(str(path)))
    await pipeline.prepare()
    given = group(3)
    for experience, reward in zip(given, (0.0, 0.5, 1.0), strict=True):
        experience.reward = reward
        experience.response_text = f"it is {reward}"
    await pipeline.process(given)
    await pipeline.process([])
    await pipeline.close()
    assert [(row["reward"], row["response_text"]) for row in lines(path)] == [
        (0.5, "it is 0.5"),
        (1.0, "it is 1.0"),
    ]
    assert [row["eid"] for row in lines(path)] == [e.eid.to_dict() for e in given[1:]]
    assert "experience_bytes" not in lines(path)[0]


async def test_a_resumed_run_adds_to_the_record_and_mends_a_torn_line(tmp_path: Path):
    path = tmp_path / "q.jsonl"
    for _ in range(2):
        record = RecordWriter(str(path))
        await record.acquire()
        await record.write(group(2))
        await record.release()
        with path.open("a") as file:
            file.write('{"torn": ')
    record = RecordWriter(str(path))
    await record.acquire()
    await record.release()
    assert len(lines(path)) == 4


async def test_what_changes_after_the_write_is_not_in_the_record(tmp_path: Path):
    record, given = RecordWriter(str(tmp_path / "q.jsonl")), group(1)
    await record.acquire()
    await record.write(given)
    given[0].info["later"] = 1
    await record.release()
    assert "later" not in lines(tmp_path / "q.jsonl")[0]["info"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
async def test_a_full_disk_is_told_and_the_run_goes_on(tmp_path: Path, caplog):
    (tmp_path / "q.jsonl").symlink_to("/dev/full")
    record = RecordWriter(str(tmp_path / "q.jsonl"), logging.getLogger("record"))
    await record.acquire()
    await record.write(group(2))
    await record.write(group(2))
    await record.release()
    assert "2 experiences are not recorded" in caplog.text
