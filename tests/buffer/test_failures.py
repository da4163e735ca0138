"""What breaks below a buffer: a disk without room, a database server that is restarted."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.buffer.conftest import MariaServer, PostgresServer
from tests.buffer.samples import experience, tasks_of
from tests.small_disk import mounted
from trinity.buffer.storage.journal import Event, JsonlJournal, StorageError
from trinity.buffer.storage.queue import QueueStorage
from trinity.buffer.storage.sql import SQLStorage
from trinity.buffer.storage.sql_ledger import SQLJournal
from trinity.common.errors import TrinityError

_LISTS, _LIST = 40, 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    with mounted(tmp_path / "disk", "2m") as folder:
        yield folder


def storage_of(kind: str, folder: Path) -> QueueStorage | SQLStorage:
    if kind == "sql":
        return SQLStorage("b", str(folder / "b.db"), owner="job")
    if kind == "sqlite":
        return QueueStorage("b", journal=SQLJournal(str(folder / "b.db"), "b"))
    return QueueStorage("b", journal=JsonlJournal(str(folder / "b.jsonl")))


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    filler.write_bytes(b"x" * shutil.disk_usage(disk).free)
    return filler


@pytest.mark.parametrize("kind", ["jsonl", "sqlite", "sql"])
async def test_a_full_disk_is_named_and_nothing_that_was_written_is_lost(
    kind: str, small_disk: Path
):
    storage = storage_of(kind, small_disk)
    await storage.prepare()
    await storage.put([experience(0), experience(1)])
    filler = fill(small_disk)
    with pytest.raises(TrinityError, match="disk is full"):
        for _ in range(100):
            await storage.put([experience("lost", num_tokens=20_000)])
    filler.unlink()
    await storage.put([experience(2)])
    state = storage.state_dict()
    await storage.close()
    again = storage_of(kind, small_disk)
    await again.prepare()
    again.load_state_dict(state)
    assert sorted(tasks_of(await again.get(9, 0.0))) == [0, 1, 2]
    await again.close()


class Full(JsonlJournal):
    """A journal whose disk may be full."""

    is_full = False

    def note(self, event: Event) -> None:
        if self.is_full:
            raise StorageError("The disk is full.")
        super().note(event)


async def test_a_read_that_cannot_be_noted_takes_nothing(tmp_path: Path):
    journal = Full(str(tmp_path / "b.jsonl"))
    storage = QueueStorage("b", journal=journal)
    await storage.prepare()
    await storage.put([experience(0), experience(1)])
    journal.is_full = True
    with pytest.raises(StorageError):
        await storage.get(1, 0.0)
    journal.is_full = False
    assert tasks_of(await storage.get(2, 0.0)) == [0, 1]
    await storage.close()


async def test_a_server_restarts_while_two_write_and_two_read(
    server: PostgresServer | MariaServer,
):
    def opened() -> SQLStorage:
        return SQLStorage("mid_run", server.url, max_retry_times=11, retry_interval_s=0.1)

    async def write(writer: int) -> None:
        storage = opened()
        await storage.prepare()
        await storage.acquire()
        for number in range(_LISTS):
            first = (writer * _LISTS + number) * _LIST
            await storage.put([experience(first + i) for i in range(_LIST)])
        await storage.release()
        await storage.close()

    async def read() -> list[int | str]:
        storage, found = opened(), []
        await storage.prepare()
        while (batch := await storage.get(3, 600)) is not None:
            found += tasks_of(batch)
        await storage.close()
        return found

    async def restart() -> None:
        for _ in range(3):
            await asyncio.sleep(0.2)
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)

    keeper = opened()
    await keeper.prepare()
    await keeper.acquire()  # until both have written all
    reading = asyncio.gather(read(), read())
    await asyncio.gather(restart(), write(0), write(1))
    await keeper.release()
    first, second = await reading
    assert sorted(map(int, [*first, *second])) == list(range(2 * _LISTS * _LIST))
    await keeper.close()
