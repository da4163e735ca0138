"""Tasksets: rows as tasks, in the order a selector gives."""

import logging
from collections.abc import Mapping, Sequence

from trinity.buffer.rows import BadRow, BadRowError, DataError, Rows, open_rows
from trinity.buffer.rows.check import (
    CHECKED_AT_START,
    RowFault,
    refuse_missing_columns,
    usable_rows,
)
from trinity.buffer.schema.task import TaskFormatter
from trinity.buffer.selector import SELECTORS, BaseSelector, DataSource
from trinity.common.config.buffer import TasksetConfig
from trinity.common.constants import OnBadRow
from trinity.common.workflows import Task

_log = logging.getLogger(__name__)


class Taskset:
    """One set of tasks: its rows, the order they come in, and how a row becomes a `Task`.

    Args:
        rows: Rows found good at start; later ones may turn out bad when they are read.
        on_bad_row: What those do: `error` raises, `skip` takes another row and counts it.
        num_bad: Rows left out so far.
    """

    def __init__(
        self,
        rows: Rows,
        formatter: TaskFormatter,
        selector: BaseSelector,
        *,
        name: str,
        on_bad_row: OnBadRow = OnBadRow.ERROR,
        num_bad: int = 0,
    ) -> None:
        self.rows = rows
        self.formatter = formatter
        self.selector = selector
        self.name = name
        self.on_bad_row = on_bad_row
        self.num_bad = num_bad

    def __len__(self) -> int:
        return len(self.rows)

    def next_tasks(self, count: int) -> list[Task]:
        """The next ``count`` tasks by the selector.

        Raises:
            BadRowError: A row can't be used, and `on_bad_row` is `error`.
        """
        tasks: list[Task] = []
        misses = 0
        while len(tasks) < count:
            indices = self.selector.get_indices(count - len(tasks))
            assert isinstance(indices, list)
            tasks += self._usable(indices)
            misses = 0 if tasks else misses + len(indices)
            if misses > len(self):
                raise DataError(f"No row of the taskset {self.name!r} can be used.")
        return tasks

    def all_tasks(self) -> list[Task]:
        """Every task, in the order of the rows."""
        return self._usable(range(len(self)))

    def _usable(self, indices: Sequence[int]) -> list[Task]:
        tasks, bad = [], []
        for index in indices:
            try:
                tasks.append(self.formatter.format(self.rows[index], index))
            except RowFault as fault:
                bad.append(BadRow(self.rows.where(index), fault.key, fault.reason))
            except BadRowError as error:
                bad += error.bad_rows
        if bad and self.on_bad_row is OnBadRow.ERROR:
            raise BadRowError(bad)
        for row in bad:
            _log.warning("Left out: %s", row)
        self.num_bad += len(bad)
        return tasks

    def state_dict(self) -> dict[str, object]:
        return {"name": self.name, "size": len(self), "selector": self.selector.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        if state.get("size", len(self)) != len(self):
            raise DataError(
                f"The taskset {self.name!r} has {len(self)} tasks, but had {state['size']} when "
                "the checkpoint was saved: a resume would skip or repeat tasks. Restore the data, "
                "or start under a new name."
            )
        self.selector.load_state_dict(state["selector"])  # type: ignore[arg-type]  # from state_dict


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
    return Taskset(
        rows,
        formatter,
        selector(DataSource(rows), config.data_selector),
        name=config.name or f"{'eval_' if is_eval else ''}taskset_{taskset_id}",
        on_bad_row=config.on_bad_row,
        num_bad=len(bad),
    )


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
        shows_progress=config.enable_progress_bar,
    )
