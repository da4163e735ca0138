import asyncio
from pathlib import Path

import pytest
import torch

from tests.buffer.samples import experience
from trinity.buffer.convert import convert
from trinity.buffer.rows import DataError, open_rows
from trinity.buffer.schema.experience import SavedExperienceFormatter
from trinity.buffer.storage.sql import SQLStorage
from trinity.buffer.writer.file import FileWriter
from trinity.common.constants import StorageType
from trinity.common.experience import Experience


def tasks(folder: Path, count: int = 1100) -> str:
    path = folder / "tasks.jsonl"
    path.write_text(
        "".join(f'{{"q": "q{i}", "n": {i}, "x": {{"a": [{i}]}}}}\n' for i in range(count))
    )
    return str(path)


def test_tasks_go_round_through_every_form(tmp_path: Path, database: str):
    start = tasks(tmp_path)
    parquet, again = str(tmp_path / "a.parquet"), str(tmp_path / "again.jsonl")
    assert convert(start, parquet) == ("tasks", 1100)
    assert convert(parquet, database, target_table="t") == ("tasks", 1100)
    assert convert(database, again, table="t") == ("tasks", 1100)
    assert Path(again).read_text() == Path(start).read_text()
    rows = open_rows(database, storage_type=StorageType.SQL, table="t")
    assert rows[1099] == {"q": "q1099", "n": 1099, "x": {"a": [1099]}}


def saved(folder: Path) -> str:
    async def run() -> None:
        writer = FileWriter(str(folder / "e.jsonl"))
        await writer.acquire()
        advantages = torch.arange(4).float()
        await writer.write([experience(i, advantages=advantages * i) for i in range(3)])
        await writer.release()

    asyncio.run(run())
    return str(folder / "e.jsonl")


def test_experiences_keep_every_tensor(tmp_path: Path, database: str):
    start = saved(tmp_path)
    parquet, again = str(tmp_path / "e.parquet"), str(tmp_path / "again.jsonl")
    assert convert(start, parquet) == ("experiences", 3)
    assert convert(parquet, database, target_table="e") == ("experiences", 3)
    assert convert(database, again) == ("experiences", 3)
    rows, formatter = open_rows(again), SavedExperienceFormatter()
    found: list[Experience] = [formatter.format(rows[i]) for i in range(3)]
    assert [e.advantages.tolist() for e in found] == [[0.0, i, 2.0 * i, 3.0 * i] for i in range(3)]
    assert found[2].response_text == "answer 2"


async def test_converted_experiences_can_be_trained_on_to_their_end(tmp_path: Path):
    path = str(tmp_path / "e.db")
    await asyncio.to_thread(lambda: convert(saved(tmp_path), path, target_table="e"))
    storage = SQLStorage("e", path, grace_s=0)
    await storage.prepare()
    assert len(await storage.get(2, 1)) == 2
    assert len(await storage.get(2, 1)) == 1
    assert await storage.get(2, 1) is None


def test_what_cannot_be_is_told(tmp_path: Path):
    start = tasks(tmp_path, 3)
    (tmp_path / "uneven.jsonl").write_text('{"q": 1}\n{"q": "a"}\n')
    with pytest.raises(DataError, match=r"Write \.jsonl instead"):
        convert(str(tmp_path / "uneven.jsonl"), str(tmp_path / "x.parquet"))
    assert not (tmp_path / "x.parquet").exists()
    with pytest.raises(DataError, match="exists already"):
        convert(start, start)
    with pytest.raises(DataError, match="ends in none of"):
        convert(start, str(tmp_path / "x.txt"))
    convert(start, str(tmp_path / "two.db"), target_table="a")
    convert(start, str(tmp_path / "two.db"), target_table="b")
    with pytest.raises(DataError, match=r"has several tables\. Name one of: a, b"):
        convert(str(tmp_path / "two.db"), str(tmp_path / "y.jsonl"))


def test_columns_that_some_rows_lack_are_kept_or_named(tmp_path):
    source, target = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    source.write_text('{"q": "a"}\n{"q": "b", "hint": "h"}\n')
    assert convert(str(source), str(target)) == ("tasks", 2)
    rows = open_rows(str(target))
    assert [rows[0], rows[1]] == [{"q": "a", "hint": None}, {"q": "b", "hint": "h"}]
    late = tmp_path / "late.jsonl"
    late.write_text('{"q": "a"}\n' * 500 + '{"q": "b", "hint": "h"}\n')
    with pytest.raises(DataError, match="has 'hint', which the first 500 rows have not"):
        convert(str(late), str(tmp_path / "late.parquet"))


@pytest.mark.parametrize(
    "row", ['{"a": {}}', '{"a": 123456789012345678901234}', '{"a": "\\ud800"}']
)
def test_what_parquet_cannot_hold_goes_into_json_lines(tmp_path: Path, row: str):
    path = tmp_path / "odd.jsonl"
    path.write_text(f"{row}\n")
    with pytest.raises(DataError, match=r"Parquet can't hold a row: .* Write \.jsonl instead"):
        convert(str(path), str(tmp_path / "odd.parquet"))
    convert(str(path), str(tmp_path / "again.jsonl"))
    assert (tmp_path / "again.jsonl").read_text() == path.read_text()


def test_an_empty_table_has_no_columns_for_parquet(tmp_path: Path):
    async def make() -> None:
        storage = SQLStorage("t", str(tmp_path / "t.db"))
        await storage.prepare()
        await storage.close()

    asyncio.run(make())
    with pytest.raises(DataError, match="no rows"):
        convert(str(tmp_path / "t.db"), str(tmp_path / "t.parquet"))
    assert not (tmp_path / "t.parquet").exists()
