"""Rows are counted without opening the data set, and as many as opening it finds."""

import json

import pytest

from trinity.buffer.rows import open_rows
from trinity.buffer.rows.count import count_rows
from trinity.common.constants import StorageType

ROWS = [{"question": str(i)} for i in range(10)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    import datasets

    folder = tmp_path_factory.mktemp("data")
    lines = "\n".join(map(json.dumps, ROWS)) + "\n\n"
    (folder / "lines.jsonl").write_text(lines)
    (folder / "array.json").write_text(json.dumps(ROWS))
    (folder / "table.csv").write_text("question\n1\n2\n")
    (folder / "broken.parquet").write_text("no such thing")
    split = folder / "split"
    split.mkdir()
    (split / "train.jsonl").write_text(lines)
    (split / "test.jsonl").write_text("\n".join(map(json.dumps, ROWS[:5])))
    made = datasets.Dataset.from_list(ROWS)
    made.to_parquet(folder / "table.parquet")
    made.save_to_disk(folder / "saved")
    return folder


@pytest.mark.parametrize("name", ["lines.jsonl", "array.json", "split", "table.parquet"])
@pytest.mark.parametrize("split", ["train", "train[:3]", "train[10%:50%]", "train[-2:]+train[:1]"])
def test_as_many_as_there_are(root, name, split):
    path = str(root / name)
    assert count_rows(path, split) == len(open_rows(path, split=split)) > 0


def test_a_sum_of_splits(root):
    assert count_rows(str(root / "split"), "train+test") == 15


@pytest.mark.parametrize("name", ["table.csv", "saved", "broken.parquet", "nowhere.jsonl"])
def test_what_does_not_tell(root, name):
    assert count_rows(str(root / name)) is None


def test_neither_do_the_hub_databases_and_unknown_splits(root):
    assert count_rows("owner/name") is None
    assert count_rows(str(root / "lines.jsonl"), "elsewhere") is None
    assert count_rows(str(root / "lines.jsonl"), "a[b]") is None
    assert count_rows(str(root / "lines.jsonl"), storage_type=StorageType.SQL) is None
