"""A database between explorer and trainer of one command, over a kill and a resume."""

from pathlib import Path

from tests.buffer.samples import group
from trinity.buffer.reader.queue import QueueReader
from trinity.buffer.storage.sql import SQLStorage
from trinity.buffer.writer.queue import QueueWriter


def parts(path: Path) -> tuple[SQLStorage, QueueWriter, QueueReader]:
    storage = SQLStorage("b", f"sqlite:///{path}/b.db", owner="job:both")
    return storage, QueueWriter(storage), QueueReader(storage, timeout_s=1)


async def test_restore_then_prepare_as_the_launcher_does(tmp_path: Path):
    storage, writer, reader = parts(tmp_path)
    await storage.prepare()
    await writer.acquire()
    await writer.write(group(3, batch=1))
    await reader.read(2)
    state, position = storage.state_dict(), reader.state_dict()
    await reader.read(1)
    await writer.write(group(3, batch=2))  # after the checkpoint; killed without a release

    storage, writer, reader = parts(tmp_path)
    reader.load_state_dict(position)
    storage.load_state_dict(state)
    await storage.prepare()
    await writer.acquire()
    await writer.write(group(1, batch=2))
    found = await reader.read(2)
    assert sorted((e.eid.batch, e.eid.task) for e in found) == [(1, 0), (2, 0)]
    assert await writer.release() == 0
    assert await storage.get(1, 1) is None
