"""How many rows a data set has, where its files tell without a download, a copy or `datasets`."""

from pathlib import Path

from trinity.buffer.rows.base import DataError
from trinity.buffer.rows.files import DataFiles
from trinity.buffer.rows.open import open_files, plain_files
from trinity.buffer.rows.split import parse_split
from trinity.common.constants import StorageType


def count_rows(
    path: str,
    split: str = "train",
    subset: str | None = None,
    storage_type: StorageType | str = StorageType.FILE,
) -> int | None:
    """The rows that `open_rows` would find; None if these files do not tell."""
    if storage_type is not StorageType.FILE:
        return None
    total = 0
    try:
        for part in parse_split(split):
            files = plain_files(path, part.name, subset)
            size = None if files is None else _count(files)
            if size is None:
                return None
            total += len(part.range(size))
    except (DataError, OSError):
        return None
    return total


def _count(files: DataFiles) -> int | None:
    plain = all(path.suffix in (".jsonl", ".ndjson", ".json") for path in files.paths)
    if files.format in ("jsonl", "json") and plain:
        return len(open_files(files))
    if files.format == "parquet":
        return sum(map(_rows_of_parquet, files.paths))
    return None


def _rows_of_parquet(path: Path) -> int:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import read_metadata

    try:
        return int(read_metadata(path).num_rows)
    except ArrowInvalid as error:
        raise DataError(f"{str(path)!r} is no Parquet file: {error}") from error
