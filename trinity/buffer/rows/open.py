"""A path, hub name or database -> `Rows`. The only place that imports `datasets`."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any

from trinity.buffer.rows.base import BadRow, BadRowError, DataError, ListRows, PickedRows, Row, Rows
from trinity.buffer.rows.files import FORMATS, DataFiles, find_files
from trinity.buffer.rows.jsonl import JsonLines
from trinity.buffer.rows.split import SplitPart, parse_split
from trinity.common.constants import StorageType
from trinity.utils.hub import hub_problem

_HUB_NAME = re.compile(r"^[\w-][\w.-]*/[\w.-]+$")
_WHOLE_FILE_BYTES = 256 * 2**20

_shows_progress: ContextVar[bool] = ContextVar("shows_progress", default=False)


def open_rows(
    path: str,
    *,
    split: str = "train",
    subset: str | None = None,
    storage_type: StorageType = StorageType.FILE,
    table: str = "",
    max_retry_times: int = 3,
    retry_interval_s: float = 1.0,
    shows_progress: bool = False,
) -> Rows:
    """The rows of a data set.

    Args:
        path: A file, a folder, or a name on the hub; the address of a database for `sql`; the
            name of a data set for `reasoning_gym`, arguments as `name?size=500&seed=1`; the
            id of a taskset for `verifiers`, in the same form.
        split: Split, also a part of one (`train[:100]`, `train[10%:20%]`) or a sum (`a+b`).
        subset: `name` of `datasets.load_dataset`; in a plain folder a sub-folder.
        table: Table of tasks in a database.
        max_retry_times, retry_interval_s: Of reads of a database, as for `Database`.
        shows_progress: Show the progress bars of `datasets` where it reads or converts files.

    Raises:
        DataError: It is missing, empty or of an unknown form.
    """
    if storage_type is StorageType.SQL:
        from trinity.buffer.rows.sql import SQLTaskRows

        rows = SQLTaskRows(
            path, table, max_retry_times=max_retry_times, retry_interval_s=retry_interval_s
        )
        return _not_empty(rows, path, split)
    if storage_type is StorageType.REASONING_GYM:
        from trinity.buffer.rows.reasoning import reasoning_rows

        return reasoning_rows(path)
    if storage_type is StorageType.VERIFIERS:
        from trinity.buffer.rows.verifiers_tasks import verifiers_rows

        return _not_empty(verifiers_rows(path), path, split)
    token = _shows_progress.set(shows_progress)
    try:
        parts = [_open_part(path, part, subset) for part in parse_split(split)]
    finally:
        _shows_progress.reset(token)
    return _not_empty(parts[0] if len(parts) == 1 else ChainedRows(parts), path, split)


def _not_empty(rows: Rows, path: str, split: str) -> Rows:
    if not len(rows):
        raise DataError(f"The split {split!r} of {path!r} is empty: it has no rows.", key="split")
    return rows


def _open_part(path: str, part: SplitPart, subset: str | None) -> Rows:
    rows = _open_split(path, part.name, subset)
    return rows if part.is_whole else PickedRows(rows, part.range(len(rows)))


def _open_split(path: str, split: str, subset: str | None) -> Rows:
    local = Path(path).expanduser()
    if not local.exists():
        if _is_path(path):
            raise DataError(f"There is no data at {path!r}. Give a file, a folder or a hub name.")
        return _from_hub(path, split, subset)
    if _is_saved(local):
        return _saved_to_disk(local, split)
    files = plain_files(path, split, subset)
    return _load(path, split, subset) if files is None else open_files(files)


def plain_files(path: str, split: str, subset: str | None) -> DataFiles | None:
    """The files of a split that need no one to tell what is in them; None where `datasets` does.

    Raises:
        DataError: As `find_files`.
    """
    local = Path(path).expanduser()
    if not local.exists() or _is_saved(local) or _configured_by_readme(local):
        return None
    return find_files(local, split, subset)


def open_files(files: DataFiles) -> Rows:
    """The rows of files of one format."""
    if files.format == "jsonl":
        return JsonLines(files.paths)
    if files.format == "json":
        parts = [_open_json(path) for path in files.paths]
        return parts[0] if len(parts) == 1 else ChainedRows(parts)
    return _packaged(files.format, files.paths)


def _is_path(path: str) -> bool:
    """Whether ``path`` can't be a name on the hub, which is `owner/name`."""
    return not _HUB_NAME.match(path) or Path(path).suffix in FORMATS


def _open_json(path: Path) -> Rows:
    """A `.json` file: one array of objects, or one object a line."""
    if path.suffix.lower() != ".json":
        return _packaged("json", [path])
    with path.open("rb") as stream:
        start = stream.read(4096).lstrip()
    if not start.startswith(b"["):
        return JsonLines([path])
    if path.stat().st_size > _WHOLE_FILE_BYTES:
        return _packaged("json", [path])
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadRowError([BadRow(path.name, "", f"not JSON ({error})")]) from None
    return ListRows(rows, path.name)


def _is_saved(local: Path) -> bool:
    """Whether it is a folder of `Dataset.save_to_disk`."""
    return (local / "state.json").is_file() or (local / "dataset_dict.json").is_file()


def _configured_by_readme(folder: Path) -> bool:
    """Whether a README says which files are which split, as the hub has it."""
    readme = folder / "README.md"
    if not readme.is_file():
        return False
    text = readme.read_text(encoding="utf-8", errors="replace")
    head = text.split("---", 2)[1] if text.startswith("---") else ""
    return re.search(r"^configs:", head, re.MULTILINE) is not None


def _packaged(form: str, paths: Sequence[Path]) -> Rows:
    """Files by a builder of `datasets`, which keeps them as Arrow on disk, mapped into memory."""
    names = [str(path) for path in paths]
    options: dict[str, object] = {"data_files": {"train": names}, "split": "train"}
    if form == "csv" and paths[0].suffix.lower() == ".tsv":
        options["sep"] = "\t"
    return _guarded(lambda datasets: datasets.load_dataset(form, **options), ", ".join(names))


def _load(path: str, split: str, subset: str | None) -> Rows:
    return _guarded(
        lambda datasets: datasets.load_dataset(path, name=subset, split=split),
        f"{path!r} (subset {subset!r}, split {split!r})",
    )


def _from_hub(path: str, split: str, subset: str | None) -> Rows:
    problem = hub_problem(path, "dataset")  # `datasets` itself would try for half a minute
    if problem:
        raise DataError(f"{path!r} is no data set that can be had. {problem}")
    return _load(path, split, subset)


def _saved_to_disk(folder: Path, split: str) -> Rows:
    def load(datasets: Any) -> Any:
        found = datasets.load_from_disk(str(folder))
        return found[split] if isinstance(found, Mapping) else found

    return _guarded(load, f"{str(folder)!r} (split {split!r})")


def _guarded(load: Callable[[Any], Any], what: str) -> Rows:
    import datasets

    was_enabled = datasets.is_progress_bar_enabled()
    if _shows_progress.get():
        datasets.enable_progress_bars()
    else:
        datasets.disable_progress_bars()
    try:
        return ArrowRows(load(datasets), what)
    except Exception as error:  # readers of other people's files raise all kinds
        cause = error.__cause__ or error
        raise DataError(f"{what} can't be read: {type(cause).__name__}: {cause}") from error
    finally:
        if was_enabled:
            datasets.enable_progress_bars()
        else:
            datasets.disable_progress_bars()


class ArrowRows:
    """The rows of a `datasets.Dataset`."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset = dataset
        self._name = os.path.basename(name)

    @cached_property
    def columns(self) -> list[str]:
        return list(self.dataset.column_names)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Row:
        return dict(self.dataset[int(index)])

    def page(self, start: int, stop: int) -> list[Row]:
        columns = self.dataset[start:stop]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def where(self, index: int) -> str:
        return f"{self._name}, row {index + 1}"


class ChainedRows:
    """Several sets of rows, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for part in self._parts for name in part.columns))

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, index: int) -> Row:
        part, local = self._locate(index)
        return part[local]

    def where(self, index: int) -> str:
        part, local = self._locate(index)
        return part.where(local)

    def _locate(self, index: int) -> tuple[Rows, int]:
        for part in self._parts:
            if index < len(part):
                return part, index
            index -= len(part)
        raise IndexError(index)
