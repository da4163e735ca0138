"""Which files a data set path means: files, folders, splits and subsets, without opening them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trinity.buffer.rows.base import DataError

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_METADATA = {
    "dataset_infos.json",
    "dataset_info.json",
    "dataset_dict.json",
    "state.json",
    "configuration.json",
    "config.json",
}
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


@dataclass(frozen=True)
class DataFiles:
    """Files of one format that make up one split of a data set."""

    format: str
    paths: tuple[Path, ...]


def find_files(path: Path, split: str, subset: str | None = None) -> DataFiles:
    """The files of ``split`` in a file or plain folder.

    A file is one split: `train`, and any split that its name holds. In a folder the names of
    files and of folders tell the splits; what names none is `train`. ``subset`` is a folder
    in ``path``, or a word in the names of the files; a folder that knows no subsets at all
    holds that one subset.

    Raises:
        DataError: No such path, subset or split.
    """
    if path.is_file():
        return _single(path, split)
    if not path.is_dir():
        raise DataError(f"There is no data at {str(path)!r}. Give a file, a folder or a hub name.")
    files = _data_files(path)
    if not files:
        known = ", ".join(sorted(FORMATS))
        raise DataError(f"The folder {str(path)!r} holds no data files ({known}).")
    files = _of_subset(path, files, subset)
    return _of_one_format(path, _of_split(path, files, split))


def format_of(path: Path) -> str | None:
    """ "jsonl", "csv" ... by the file's name; None for what is no data."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED and len(suffixes) > 1:
        found = FORMATS.get(suffixes[-2])
        return "json" if found == "jsonl" else found  # `datasets` unpacks and reads both alike
    return FORMATS.get(suffixes[-1]) if suffixes else None


def split_of(path: Path) -> str | None:
    """The split that a file's or folder's name tells, or None."""
    words = re.split(r"[^a-z]+", path.name.lower())
    return next((s for s, names in _WORDS.items() if any(n in words for n in names)), None)


def canonical_split(split: str) -> str:
    """`dev` -> `validation` and so on; other names stay."""
    return next((s for s, names in _WORDS.items() if split.lower() in names), split)


def _single(path: Path, split: str) -> DataFiles:
    form = format_of(path)
    if form is None:
        raise DataError(f"{str(path)!r} is no data file: its name ends in none of "
                        f"{', '.join(sorted(FORMATS))}.")  # fmt: skip
    wanted = canonical_split(split)
    if wanted not in ("train", split_of(path)):
        raise DataError(
            f"The split {split!r} is not in {str(path)!r}: a single file is the split 'train'. "
            "Give the folder that holds one file a split, or the file itself with split: train.",
            key="split",
        )
    return DataFiles(form, (path,))


def _data_files(folder: Path) -> list[Path]:
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file()
        and path.name not in _METADATA
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
        and format_of(path) is not None
    ]
    return sorted(files)


def _of_subset(folder: Path, files: list[Path], subset: str | None) -> list[Path]:
    subsets = _subsets(folder, files)
    if subset is None:
        if len(subsets) > 1 and not any(_belongs(folder, file, None) for file in files):
            raise DataError(
                f"{str(folder)!r} has the subsets {', '.join(subsets)}. Name one as subset_name.",
                key="subset_name",
            )
        top = [file for file in files if _belongs(folder, file, None)]
        return top or files
    inside = [file for file in files if file.relative_to(folder).parts[0] == subset]
    if inside:
        return inside
    named = [
        file for file in files if subset in re.split(r"[^\w-]+|_(?=train|test|val)", file.stem)
    ]
    if named:
        return named
    if subsets:
        raise DataError(
            f"{str(folder)!r} has no subset {subset!r}. It has: {', '.join(subsets)}.",
            key="subset_name",
        )
    return files


def _subsets(folder: Path, files: Iterable[Path]) -> list[str]:
    """Folders in the data set that are neither a split nor plain `data`."""
    tops = (file.relative_to(folder).parts for file in files)
    return sorted({parts[0] for parts in tops if len(parts) > 1 and _is_subset_name(parts[0])})


def _is_subset_name(name: str) -> bool:
    return name != "data" and split_of(Path(name)) is None


def _belongs(folder: Path, file: Path, subset: str | None) -> bool:
    parts = file.relative_to(folder).parts
    return len(parts) == 1 or not _is_subset_name(parts[0]) or parts[0] == subset


def _of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    by_split: dict[str, list[Path]] = {}
    for file in files:
        names = [Path(part) for part in reversed(file.relative_to(folder).parts)]
        told = next((s for s in map(split_of, names) if s is not None), None)
        by_split.setdefault(told or "train", []).append(file)
    exact = [file for file in files if file.stem.split("-")[0] == split]
    found = by_split.get(canonical_split(split)) or exact
    if not found:
        known = ", ".join(sorted(by_split))
        raise DataError(
            f"The split {split!r} is not in {str(folder)!r}. It has: {known}.",
            key="split",
        )
    return found


def _of_one_format(folder: Path, files: list[Path]) -> DataFiles:
    formats = {format_of(file) for file in files}
    if len(formats) > 1 and "json" in formats:  # beside tables it is more likely a description
        formats.remove("json")
        files = [file for file in files if format_of(file) != "json"]
    if len(formats) > 1:
        raise DataError(
            f"{str(folder)!r} mixes data files of several kinds in one split: "
            f"{', '.join(file.name for file in files[:6])}. Give the file, or a folder of one kind."
        )
    form = formats.pop()
    assert form is not None
    return DataFiles(form, tuple(files))
