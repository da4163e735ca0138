"""Rows of a table of tasks in a database, read in pages."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from trinity.buffer.rows.base import BadRow, BadRowError, DataError, Row, first_columns
from trinity.common.schema.database import Database, DatabaseProblem
from trinity.common.schema.tables import TaskTable

_PAGE_ROWS = 200
_PAGES = 50


class SQLTaskRows:
    """The rows of the table ``name`` at the address ``path``; the rest as for `Database`."""

    def __init__(
        self, path: str, name: str, *, max_retry_times: int = 3, retry_interval_s: float = 1.0
    ) -> None:
        self._name = name
        self._database = Database(
            path,
            max_retry_times=max_retry_times,
            retry_interval_s=retry_interval_s,
            must_exist=True,
        )
        self._table = TaskTable(name)
        try:
            self._database.open()
        except DatabaseProblem as error:
            raise DataError(str(error)) from error
        if not self._database.has_table(name):
            tables = ", ".join(self._database.table_names()) or "none"
            raise DataError(f"{path!r} has no table {name!r}. Its tables: {tables}.", key="name")
        self._ids = np.array(self._database.read(self._table.ids), dtype=np.int64)
        self._page = lru_cache(maxsize=_PAGES)(self._read_page)

    @property
    def columns(self) -> list[str]:
        return first_columns(self)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = self._page(index // _PAGE_ROWS)[index % _PAGE_ROWS]
        if not isinstance(row, dict):
            raise BadRowError([BadRow(self.where(index), "raw_task", "not an object")])
        return row

    def where(self, index: int) -> str:
        return f"table {self._name}, id {self._ids[index]}"

    def _read_page(self, number: int) -> list[object]:
        ids = self._ids[number * _PAGE_ROWS : (number + 1) * _PAGE_ROWS].tolist()
        return self._database.read(lambda c: self._table.between(c, ids[0], ids[-1]))


def write_tasks(path: str, name: str, rows: Sequence[Row]) -> None:
    """Append rows to a table of tasks, all or none of them."""
    table = TaskTable(name)
    with Database(path) as database:
        database.create(table.table)
        database.run(lambda connection: table.append(connection, rows))
