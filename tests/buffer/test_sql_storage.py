import asyncio
import multiprocessing
import os
import sqlite3
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.buffer.conftest import MariaServer, PostgresServer
from tests.buffer.samples import experience, group, tasks_of
from trinity.buffer.rows import DataError
from trinity.buffer.rows.sql import SQLTaskRows, write_tasks
from trinity.buffer.storage.sql import SQLStorage
from trinity.common.errors import DeadlineError, MissingExtraError
from trinity.common.schema.database import Database, DatabaseProblem
from trinity.common.schema.sql_schema import buffer_tables
from trinity.common.schema.tables import Filters

ROWS_ENV = "TRINITY_TEST_SQL_ROWS"  # 50000 for the full trial, about a minute each


async def opened(path: str, **settings) -> SQLStorage:
    storage = SQLStorage("b", path, retry_interval_s=0.05, **settings)
    await storage.prepare()
    return storage


async def test_full_batches_newest_first_each_once(database: str):
    storage = await opened(database)
    await storage.acquire()
    await storage.put(group(5))
    assert tasks_of(await storage.get(2, 1)) == [4, 3]
    assert tasks_of(await storage.get(3, 1)) == [2, 1, 0]
    with pytest.raises(DeadlineError, match="1 writer"):
        await storage.get(1, 0.05)


async def test_another_process_object_sees_the_end(database: str):
    writer, reader = await opened(database), await opened(database)
    await writer.acquire()
    await writer.put(group(3))
    reading = asyncio.create_task(reader.get(4, 60))
    await asyncio.sleep(0.05)
    await writer.release()
    assert len(await reading) == 3
    assert await reader.get(4, 5) is None


async def test_flush_reaches_a_reader_elsewhere(database: str):
    writer, reader = await opened(database), await opened(database)
    await writer.acquire()
    await writer.put(group(2))
    await writer.flush(1)
    assert len(await reader.get(4, 5, step=1)) == 2
    with pytest.raises(DeadlineError):
        await reader.get(4, 0.05, step=2)


async def test_old_rows_are_left_and_edited_rewards_count(database: str):
    storage = await opened(database)
    await storage.put([experience(v, version=v) for v in range(4)])
    inner = storage._database
    inner.run(lambda c: c.execute(text("UPDATE b SET reward = 7 WHERE model_version = 3")) and None)
    found = await storage.get(2, 1, min_model_version=2)
    assert [(e.info["model_version"], e.reward) for e in found] == [(3, 7.0), (2, 1.0)]


async def test_replay_reads_the_least_used_first(database: str):
    storage = await opened(database, is_replayed=True)
    await storage.put(group(3))
    assert tasks_of(await storage.get(2, 1)) == [2, 1]
    assert tasks_of(await storage.get(2, 1)) == [0, 2]


async def test_a_resume_takes_back_later_reads_and_writes(database: str):
    first = await opened(database, owner="job")
    await first.put(group(4, batch=1))
    await first.get(2, 1)
    state = first.state_dict()
    await first.get(2, 1)
    await first.put(group(2, batch=2))
    again = await opened(database, owner="job")
    again.load_state_dict(state)
    assert tasks_of(await again.get(2, 1)) == [1, 0]
    assert await again.size() == 0


async def test_reads_of_a_run_killed_before_its_checkpoint_come_back(database: str):
    first = await opened(database, owner="job")
    await first.put(group(2))
    await first.get(2, 1)
    assert await (await opened(database)).size() == 0
    again = await opened(database, owner="job")
    assert len(await again.get(2, 1)) == 2


async def test_a_killed_writer_that_comes_back_does_not_keep_the_buffer_open(database: str):
    await (await opened(database, owner="explorer")).acquire()
    again = await opened(database, owner="explorer")
    assert await again.acquire() == 1
    assert await again.release() == 0


async def test_a_cancelled_read_takes_nothing(database: str):
    storage = await opened(database)
    await storage.put(group(2))
    reading = asyncio.create_task(storage.get(2, 5))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert len(await storage.get(2, 1)) == 2


async def test_all_kinds_keep_size_digits_and_letters(database: str):
    storage = await opened(database)
    large = experience(0, reward=0.1)
    large.info["note"] = "é🙂" * 40_000  # above what MySQL's own blob holds
    large.eid.task, other = "Task", experience(1, reward=-1e-9)
    other.eid.task = "task"
    await storage.put([large, other])
    second, first = await storage.get(2, 1)
    assert (first.reward, second.reward) == (0.1, -1e-9)
    assert first.info["note"] == large.info["note"]
    tables = storage._tables.tables
    found = storage._database.read(lambda c: tables.query(c, 0, 9, Filters(task_id="Task")))
    assert [row.experience.eid.task for row in found] == ["Task"]


async def test_rows_get_their_ids_where_a_database_returns_none_of_many(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """As MySQL 8, beside MariaDB."""
    storage = await opened(database)
    engine = storage._database._engine
    monkeypatch.setattr(engine.dialect, "insert_returning", False)
    await storage.put(group(3))
    assert tasks_of(await storage.get(3, 1)) == [2, 1, 0]


def test_many_processes_make_their_tables_at_once(database: str):
    with ThreadPoolExecutor(8) as pool:
        made = [pool.submit(_make_tables, database, f"t{number % 3}") for number in range(8)]
    assert [future.result() for future in made] == [None] * 8
    with Database(database) as there:
        assert {"t0", "t1", "t2"} <= set(there.table_names())


def _make_tables(url: str, name: str) -> None:
    with Database(url) as there:
        there.create(*buffer_tables(name))


async def test_too_large_experiences_are_counted(database: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRINITY_MAX_EXP_SIZE", "200")
    storage = await opened(database)
    metrics = await storage.put([experience(0), experience(1, num_tokens=500)])
    assert metrics["too_large"] == 1
    assert await storage.size() == 1


def _write(path: str, writer: int, count: int) -> None:
    async def run() -> None:
        storage = SQLStorage("b", path)
        await storage.prepare()
        await storage.acquire()
        for start in range(0, count, 50):
            rows = [experience(writer * count + start + i) for i in range(50)]
            await storage.put(rows)
        await storage.release()
        await storage.close()

    asyncio.run(run())


def _read(path: str, found: "multiprocessing.Queue[list[str]]") -> None:
    async def run() -> list[str]:
        storage = SQLStorage("b", path)
        await storage.prepare()
        tasks: list[str] = []
        while (batch := await storage.get(64, 600)) is not None:
            tasks += map(str, tasks_of(batch))
        await storage.close()
        return tasks

    found.put(asyncio.run(run()))


def play_processes(path: str, per_writer: int) -> None:
    """4 processes write while 2 read: each experience is read exactly once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.buffer.test_sql_storage"])  # torch is imported once
    asyncio.run(_hold_open(path, context, per_writer))


async def _hold_open(path: str, context, per_writer: int) -> None:
    keeper = await opened(path)
    await keeper.acquire()  # until all writers have started
    results = context.Queue()
    writers = [context.Process(target=_write, args=(path, i, per_writer)) for i in range(4)]
    readers = [context.Process(target=_read, args=(path, results)) for _ in range(2)]
    for process in writers + readers:
        process.start()
    for process in writers:
        await asyncio.to_thread(process.join)
        assert process.exitcode == 0
    await keeper.release()
    read = [task for _ in readers for task in await asyncio.to_thread(results.get, True, 600)]
    for process in readers:
        process.join()
    assert sorted(map(int, read)) == list(range(4 * per_writer))


@pytest.mark.slow
def test_four_processes_write_while_two_read(database: str):
    play_processes(database, per_writer=int(os.environ.get(ROWS_ENV, 2000)) // 4)


async def test_a_restart_of_the_server_loses_nothing(server: PostgresServer | MariaServer):
    storage = SQLStorage("restarted", server.url, max_retry_times=10, retry_interval_s=0.2)
    await storage.prepare()
    await storage.put(group(2, batch=1))
    server.stop()
    writing = asyncio.create_task(storage.put(group(2, batch=2)))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(server.start)
    await writing
    assert sorted(tasks_of(await storage.get(4, 5))) == [0, 0, 1, 1]
    await storage.close()


def test_a_foreign_file_is_named(tmp_path: Path):
    path = tmp_path / "x.db"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(DatabaseProblem, match="no SQLite database"):
        Database(str(path)).open()


def test_a_foreign_table_is_named(database: str):
    with Database(database) as there:
        there.run(lambda c: c.execute(text("CREATE TABLE b (name TEXT)")) and None)
    with Database(database) as there:
        for _ in range(2):  # what is locked while tables are made is free again
            with pytest.raises(DatabaseProblem, match="not one of trinity's"):
                there.create(*buffer_tables("b"))
    _make_tables(database, "c")


async def test_a_locked_database_is_waited_for_and_then_named(tmp_path: Path):
    path = tmp_path / "x.db"
    storage = SQLStorage("b", str(path), max_retry_times=1, retry_interval_s=0.05)
    storage._database._busy_timeout_s = 0.05
    await storage.prepare()
    holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseProblem, match="Another program holds it"):
        await asyncio.wait_for(storage.put(group(1)), 60)
    holder.execute("ROLLBACK")
    await storage.put(group(1))
    assert await storage.size() == 1


async def test_a_full_disk_keeps_nothing_of_the_write(tmp_path: Path):
    storage = await opened(str(tmp_path / "x.db"))
    await storage.put(group(1))
    from sqlalchemy import text

    storage._database.run(lambda c: c.execute(text("PRAGMA max_page_count=40")) and None)
    with pytest.raises(DatabaseProblem, match="Make room on the disk"):
        await storage.put([experience(1, num_tokens=100_000)])
    assert await storage.size() == 1


def test_no_such_driver_or_address_is_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(
        DatabaseProblem, match=r"'nosuch://me:\*\*\*@x' is no address of a database"
    ):
        Database("nosuch://me:word@x").open()
    monkeypatch.setitem(sys.modules, "pymysql", None)
    with pytest.raises(MissingExtraError, match=r"trinity-rft\[mysql\]"):
        Database("mysql://root@127.0.0.1/x").open()


def test_tasks_in_a_table(database: str):
    write_tasks(database, "tasks", [{"question": str(i)} for i in range(450)])
    rows = SQLTaskRows(database, "tasks")
    assert len(rows) == 450
    assert rows[449] == {"question": "449"}
    assert rows.columns == ["question"]
    with pytest.raises(DataError, match=r"no table 'other'.*tasks"):
        SQLTaskRows(database, "other")
