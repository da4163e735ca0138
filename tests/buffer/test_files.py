from pathlib import Path

import psutil
import pytest

from trinity.buffer.rows import BadRowError, DataError, iterate, open_rows
from trinity.buffer.rows.files import find_files


def tree(folder: Path, *names: str, text: str = '{"q": 1}\n') -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(folder: Path, split: str, subset: str | None = None) -> list[str]:
    found = find_files(folder, split, subset)
    return [str(path.relative_to(folder)) for path in found.paths]


def test_files_and_folders_tell_the_split(tmp_path: Path):
    tree(tmp_path, "train.jsonl", "test.jsonl", "README.md", "dataset_infos.json")
    assert names(tmp_path, "train") == ["train.jsonl"]
    assert names(tmp_path, "test") == ["test.jsonl"]


def test_shards_and_a_data_folder(tmp_path: Path):
    tree(tmp_path, "data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl")
    tree(tmp_path, "data/validation-00000-of-00001.jsonl")
    assert len(names(tmp_path, "train")) == 2
    assert names(tmp_path, "dev") == ["data/validation-00000-of-00001.jsonl"]


def test_split_folders(tmp_path: Path):
    tree(tmp_path, "train/a.jsonl", "train/b.jsonl", "test/a.jsonl")
    assert names(tmp_path, "test") == ["test/a.jsonl"]


def test_a_name_without_a_split_is_train(tmp_path: Path):
    tree(tmp_path, "rows.jsonl")
    assert names(tmp_path, "train") == ["rows.jsonl"]
    with pytest.raises(DataError, match=r"split 'test' is not in .* It has: train"):
        find_files(tmp_path, "test")


def test_subsets_are_folders(tmp_path: Path):
    tree(tmp_path, "main/train-0.jsonl", "main/test-0.jsonl", "socratic/train-0.jsonl")
    assert names(tmp_path, "train", "main") == ["main/train-0.jsonl"]
    with pytest.raises(DataError, match=r"no subset 'mian'. It has: main, socratic") as error:
        find_files(tmp_path, "train", "mian")
    assert error.value.key == "subset_name"
    with pytest.raises(DataError, match="Name one as subset_name"):
        find_files(tmp_path, "train")


def test_a_plain_folder_is_its_own_subset(tmp_path: Path):
    tree(tmp_path, "train.jsonl", "test.jsonl")
    assert names(tmp_path, "train", "main") == ["train.jsonl"]


def test_a_single_file_is_train_and_what_it_is_called(tmp_path: Path):
    tree(tmp_path, "test.jsonl")
    file = tmp_path / "test.jsonl"
    assert find_files(file, "train").paths == find_files(file, "test").paths == (file,)
    with pytest.raises(DataError, match="a single file is the split 'train'"):
        find_files(file, "validation")


def test_what_is_no_data_is_named(tmp_path: Path):
    tree(tmp_path, "a.txt")
    with pytest.raises(DataError, match="holds no data files"):
        find_files(tmp_path, "train")
    with pytest.raises(DataError, match="is no data file"):
        find_files(tmp_path / "a.txt", "train")
    with pytest.raises(DataError, match="There is no data at"):
        open_rows(str(tmp_path / "missing"))


def test_slices_and_sums_of_splits(tmp_path: Path):
    lines = "".join(f'{{"q": {i}}}\n' for i in range(10))
    tree(tmp_path, "train.jsonl", "test.jsonl", text=lines)
    path = str(tmp_path)
    for split, expected in [
        ("train[:3]", [0, 1, 2]),
        ("train[-2:]", [8, 9]),
        ("train[10%:30%]", [1, 2]),
        ("train[:1]+test[9:]", [0, 9]),
    ]:
        rows = open_rows(path, split=split)
        assert [rows[i]["q"] for i in range(len(rows))] == expected
    with pytest.raises(DataError, match="is empty"):
        open_rows(path, split="train[5:5]")
    with pytest.raises(DataError, match="is no split"):
        open_rows(path, split="train[a:b]")


def test_lines_are_read_when_asked_for(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"q": "\xc3\xa4"}\r\n\n{"q": 2}\n\n[3]\n{"q": \n{"q": 5}')
    rows = open_rows(str(path))
    assert len(rows) == 5
    assert rows[0] == {"q": "ä"}
    assert rows[4] == {"q": 5}
    assert rows.where(4) == "a.jsonl, line 7"
    with pytest.raises(BadRowError, match=r"a.jsonl, line 5: a JSON list, not an object"):
        rows[2]
    with pytest.raises(BadRowError, match=r"a.jsonl, line 6: not JSON"):
        rows[3]


def test_a_json_array_and_json_lines_in_a_json_file(tmp_path: Path):
    tree(tmp_path, "array.json", text='[{"q": 1}, {"q": 2}]')
    tree(tmp_path, "lines.json", text='{"q": 1}\n{"q": 2}\n')
    tree(tmp_path, "broken.json", text='[{"q": 1}, {"q"')
    for name in ("array.json", "lines.json"):
        rows = open_rows(str(tmp_path / name))
        assert [rows[i]["q"] for i in range(len(rows))] == [1, 2]
    with pytest.raises(BadRowError, match=r"broken.json: not JSON"):
        open_rows(str(tmp_path / "broken.json"))


def test_an_empty_file_is_an_error(tmp_path: Path):
    tree(tmp_path, "train.jsonl", text="\n")
    with pytest.raises(DataError, match="is empty: it has no rows"):
        open_rows(str(tmp_path))


@pytest.mark.parametrize("form", ["parquet", "csv", "arrow", "jsonl.gz"])
def test_tables_are_read_through_datasets(form: str, tmp_path: Path):
    import gzip

    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    table = pa.table({"q": ["a", "b"], "n": [1, 2]})
    path = tmp_path / f"train.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif form == "csv":
        pyarrow.csv.write_csv(table, path)
    elif form == "arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_bytes(gzip.compress(b'{"q": "a", "n": 1}\n{"q": "b", "n": 2}\n'))
    rows = open_rows(str(tmp_path))
    assert rows[1] == {"q": "b", "n": 2}
    assert list(iterate(rows, 5)) == [(0, {"q": "a", "n": 1}), (1, {"q": "b", "n": 2})]
    assert rows.columns == ["q", "n"]


def test_a_folder_with_infos_of_another_hub_loads(tmp_path: Path):
    tree(tmp_path, "main/train.jsonl")
    (tmp_path / "dataset_infos.json").write_text(
        '{"main": {"features": {"q": {"_type": "Value"}}}}'
    )
    assert open_rows(str(tmp_path), subset="main")[0] == {"q": 1}


def test_a_data_set_saved_to_disk(tmp_path: Path):
    import datasets

    datasets.DatasetDict({"test": datasets.Dataset.from_list([{"q": 4}])}).save_to_disk(tmp_path)
    assert open_rows(str(tmp_path), split="test")[0] == {"q": 4}


def test_subsets_that_a_readme_describes(tmp_path: Path):
    tree(tmp_path, "x/one.jsonl", text='{"q": "one"}\n')
    tree(tmp_path, "x/two.jsonl", text='{"q": "two"}\n')
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: first\n  data_files:\n  - split: train\n    path: x/one.jsonl\n"
        "- config_name: second\n  data_files:\n  - split: train\n    path: x/two.jsonl\n---\n"
    )
    assert open_rows(str(tmp_path), subset="second")[0] == {"q": "two"}


def test_generated_tasks_are_the_same_for_the_same_seed():
    pytest.importorskip("reasoning_gym")
    from trinity.common.constants import StorageType

    spec = "chain_sum?size=5&seed=3&max_terms=2"
    first, again = (open_rows(spec, storage_type=StorageType.REASONING_GYM) for _ in range(2))
    assert len(first) == 5
    assert first[3] == again[3]
    with pytest.raises(DataError, match="no_such_task"):
        open_rows("no_such_task", storage_type=StorageType.REASONING_GYM)


def test_rows_that_nobody_holds_any_more_close_their_file(tmp_path: Path):
    tree(tmp_path, "train.jsonl")
    rows = open_rows(str(tmp_path))
    assert rows[0] == {"q": 1} and open_files(tmp_path)
    del rows
    assert not open_files(tmp_path)


def open_files(folder: Path) -> list[str]:
    """Files below ``folder`` that this process has open."""
    return [file.path for file in psutil.Process().open_files() if str(folder) in file.path]
