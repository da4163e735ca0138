"""Tasksets: rows as tasks, in the order a selector gives."""

from collections.abc import Mapping

from trinity.buffer.rows import DataError, Rows, open_rows
from trinity.buffer.rows.check import CHECKED_AT_START, refuse_missing_columns, usable_rows
from trinity.buffer.schema.task import TaskFormatter
from trinity.buffer.selected import SelectedRows
from trinity.buffer.selector import SELECTORS, BaseSelector, DataSource
from trinity.common.config.buffer import TasksetConfig
from trinity.common.workflows import Task


class Taskset:
    """One set of tasks: its rows, the order they come in, and how a row becomes a `Task`.

    ``source`` says where the rows are from.
    """

    def __init__(self, tasks: SelectedRows[Task], name: str, source: str = "") -> None:
        self.name = name
        self.source = source
        self._tasks = tasks

    @property
    def selector(self) -> BaseSelector:
        return self._tasks.selector

    @property
    def num_bad(self) -> int:
        """Rows left out so far."""
        return self._tasks.num_bad

    def __len__(self) -> int:
        return len(self._tasks)

    def next_tasks(self, count: int) -> list[Task]:
        """The next ``count`` tasks by the selector; see `SelectedRows.take`."""
        return self._tasks.take(count)

    def task(self, index: int) -> Task:
        """That of row ``index``; `RowFault` or `BadRowError` if it can't be used."""
        return self._tasks.one(index)

    def all_tasks(self) -> list[Task]:
        """Every task, in the order of the rows."""
        return self._tasks.at(range(len(self)))

    def state_dict(self) -> dict[str, object]:
        return {"name": self.name, "source": self.source, **self._tasks.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._tasks.load_state_dict(state)


def open_taskset(config: TasksetConfig, *, taskset_id: int = 0, is_eval: bool = False) -> Taskset:
    """The taskset of a config section, its first rows checked.

    Raises:
        DataError: The data can't be used: missing, empty, no such column, bad rows.
    """
    rows = rows_of(config)
    formatter = TaskFormatter(config, taskset_id=taskset_id, is_eval=is_eval)
    refuse_missing_columns(rows, formatter.required_keys(config.format), config.path or "")
    label = (config.name or str(config.path)) if config.enable_progress_bar else None
    rows, bad = usable_rows(rows, formatter.check, config.on_bad_row, CHECKED_AT_START, label)
    selector = SELECTORS.get(config.data_selector.selector_type)
    name = config.name or f"{'eval_' if is_eval else ''}taskset_{taskset_id}"
    tasks = SelectedRows(
        rows,
        formatter.format,
        selector(DataSource(rows), config.data_selector),
        name=f"the taskset {name!r}",
        on_bad_row=config.on_bad_row,
        num_bad=len(bad),
    )
    source = ":".join(filter(None, (config.path, config.subset_name, config.split)))
    return Taskset(tasks, name, source)


def rows_of(config: TasksetConfig) -> Rows:
    """The raw rows of a taskset.

    Raises:
        DataError: They can't be read.
    """
    if not config.path:
        raise DataError("The taskset has no path. Give a file, a folder or a hub name.")
    return open_rows(
        config.path,
        split=config.split,
        subset=config.subset_name,
        storage_type=config.storage_type,
        table=config.name,
        max_retry_times=config.max_retry_times,
        retry_interval_s=config.max_retry_interval,
        shows_progress=config.enable_progress_bar,
    )
