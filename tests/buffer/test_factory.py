import pickle
from pathlib import Path
from typing import ClassVar

import pytest

from tests.buffer.samples import group, tasks_of
from trinity.buffer import get_buffer_reader, get_buffer_writer, make_storage
from trinity.buffer.data_set import rows_of_data_set
from trinity.buffer.factory import make_journal
from trinity.buffer.reader import READER, ReaderSettings
from trinity.buffer.rows.sql import write_tasks
from trinity.buffer.taskset import rows_of
from trinity.buffer.writer import WRITER
from trinity.common.config.buffer import ExperienceBufferConfig, TasksetConfig
from trinity.common.constants import StorageType
from trinity.common.experience import Experience
from trinity.utils.registry import UnknownNameError


def section(**fields: object) -> ExperienceBufferConfig:
    return ExperienceBufferConfig(name="b", max_read_timeout=1, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "file"), [("queue", None), ("queue", "q.jsonl"), ("queue", "q.db"), ("sql", "q.db")]
)
async def test_writer_and_reader_of_a_section(kind: str, file: str | None, tmp_path: Path):
    config = section(storage_type=kind, path=file and str(tmp_path / file))
    storage = make_storage(config)
    await storage.prepare()
    writer, reader = get_buffer_writer(config, storage), get_buffer_reader(config, storage)
    await writer.acquire()
    await writer.write(group(3))
    await writer.release()
    assert sorted(tasks_of(await reader.read(4))) == [0, 1, 2]
    with pytest.raises(StopAsyncIteration):
        await reader.read(4)


@pytest.mark.parametrize("file", ["log.jsonl", "log.db"])
async def test_a_writer_without_a_storage_opens_its_own(file: str, tmp_path: Path):
    kind = StorageType.FILE if file.endswith("jsonl") else StorageType.SQL
    config = section(storage_type=kind, path=str(tmp_path / file), schema_type="experience")
    for _ in range(2):
        writer = get_buffer_writer(config)
        await writer.acquire()
        await writer.write(group(2))
        await writer.release()
    if kind is StorageType.FILE:
        reader = get_buffer_reader(config)
        assert tasks_of(await reader.read(4)) == [0, 1, 0, 1]
    else:
        storage = make_storage(config)
        await storage.prepare()
        assert await storage.size() == 4


class Shelf:
    """A plugin's reader and writer: a list."""

    rows: ClassVar[list[Experience]] = []

    def __init__(self, config: ExperienceBufferConfig, settings: ReaderSettings | None) -> None:
        self.name, self.size = config.name, settings.batch_size if settings else 0

    async def read(self, batch_size: int | None = None, **_: object) -> list[Experience]:
        size = batch_size or self.size
        found = [self.rows.pop(0) for _ in range(size)]
        return found

    async def write(self, experiences: list[Experience]) -> dict[str, float]:
        self.rows.extend(experiences)
        return {}


async def test_a_plugin_brings_a_reader_and_a_writer(monkeypatch):
    for registry in (READER, WRITER):
        monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    READER.register_module("shelf")(Shelf)
    WRITER.register_module("shelf")(Shelf)
    config = section(storage_type="shelf")
    await get_buffer_writer(config).write(group(3))
    assert tasks_of(await get_buffer_reader(config, batch_size=2).read()) == [0, 1]
    with pytest.raises(UnknownNameError, match="No buffer reader is called 'shelv'"):
        get_buffer_reader(section(storage_type="shelv"))


@pytest.mark.parametrize("file", ["q.jsonl", "q.db"])
def test_a_journal_travels_to_the_process_of_its_queue(file: str, tmp_path: Path):
    journal = make_journal(section(storage_type="queue", path=str(tmp_path / file)))
    pickle.loads(pickle.dumps(journal)).open("run")


def test_a_queue_asks_its_database_as_often_as_its_section_says(tmp_path: Path):
    path = f"sqlite:///{tmp_path}/q.db"
    journal = make_journal(section(path=path, max_retry_times=7, max_retry_interval=0.25))
    database = journal._tables.database
    assert (database._max_retry_times, database._retry_interval_s) == (7, 0.25)


def test_rows_of_a_database_are_asked_for_as_often_as_their_section_says(tmp_path: Path):
    path = f"sqlite:///{tmp_path}/rows.db"
    write_tasks(path, "b", [{"q": "1"}])
    keys = {"path": path, "storage_type": "sql", "max_retry_times": 7, "max_retry_interval": 0.25}
    for rows in (
        rows_of(TasksetConfig(name="b", **keys)),  # type: ignore[arg-type]
        rows_of_data_set(section(schema_type="sft", **keys)),
    ):
        database = rows._database  # type: ignore[attr-defined]
        assert (database._max_retry_times, database._retry_interval_s) == (7, 0.25)


@pytest.mark.parametrize("path", ["seen", "seen.jsonl"])
async def test_a_file_buffer_may_be_named_by_its_folder(path: str, tmp_path: Path):
    config = section(storage_type=StorageType.FILE, path=str(tmp_path / path))
    writer = get_buffer_writer(config)
    await writer.acquire()
    await writer.write(group(3))
    await writer.release()
    assert (tmp_path / path).is_dir() == (path == "seen")
    rows = rows_of_data_set(config)
    assert [row["eid"]["task"] for row in rows] == [0, 1, 2]
