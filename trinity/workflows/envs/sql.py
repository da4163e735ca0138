"""`intercode_sql_workflow`: answer a question by queries on a database, over several turns."""

import re
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from trinity.common.errors import NotSetUpError
from trinity.workflows.envs.base import EnvWorkflow, Messages, Outcome

_QUERY = re.compile(r"```sql\s*\n(.*?)```", re.S | re.I)
_RULES = """\
Answer the question by queries on a SQLite database. Write one query in a block
```sql
...
```
and you are shown its result. When your last query answers the question, write SUBMIT and no \
further query."""
_MAX_ROWS = 20
_MAX_STEPS = 5_000_000
_READS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)


class SQLWorkflow(EnvWorkflow):
    """Reward 1 if the last query gives the rows of the right one, in any order; else 0.

    The row holds the question (prompt column), the right query (response column) and ``database``,
    a SQLite file below `workflow_args.database_dir`. Queries can only read, and are ended when
    they take too long. Metrics: ``queries``, ``query_errors``.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {"database_dir": str}
    is_blocking: ClassVar[bool] = True
    default_max_turns: ClassVar[int] = 10

    def begin(self) -> Messages:
        folder = Path(self.task.workflow_args.get("database_dir", "."))
        if not folder.is_dir():
            raise NotSetUpError(
                f"There is no folder {folder.resolve()} of databases; make it, or set "
                "workflow_args.database_dir."
            )
        path = (folder / str(self.task.raw_task["database"])).resolve()
        if not path.is_file():
            raise ValueError(f"There is no database {path}; set workflow_args.database_dir.")
        self._database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, check_same_thread=False)
        tables = self._database.execute("select sql from sqlite_master where sql is not null")
        schema = "\n".join(row[0] for row in tables)
        self._database.set_authorizer(_only_reads)
        self._database.set_progress_handler(lambda: 1, _MAX_STEPS)
        self._wanted = _as_set(self._rows(str(self.task.truth)))
        self._last: list[tuple[Any, ...]] | None = None
        self._num_queries = self._num_errors = 0
        return [
            {"role": "system", "content": _RULES},
            {"role": "user", "content": f"{schema}\n\n{self.task.task_desc}"},
        ]

    def act(self, reply: str) -> Outcome:
        queries = _QUERY.findall(reply)
        if not queries:
            is_right = self._last is not None and _as_set(self._last) == self._wanted
            return Outcome("", float(is_right), True, self._metrics())
        self._num_queries += 1
        try:
            self._last = self._rows(queries[-1])
        except (sqlite3.Error, sqlite3.Warning) as error:
            self._num_errors += 1
            self._last = None
            return Outcome(f"Error: {error}", metrics=self._metrics())
        shown = "\n".join(map(str, self._last[:_MAX_ROWS]))
        more = len(self._last) - _MAX_ROWS
        text = (shown or "(no rows)") + (f"\n... {more} more rows" if more > 0 else "")
        return Outcome(text, metrics=self._metrics())

    def end(self) -> None:
        if hasattr(self, "_database"):
            self._database.close()

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        return self._database.execute(query).fetchmany(10_000)

    def _metrics(self) -> dict[str, float]:
        return {"queries": float(self._num_queries), "query_errors": float(self._num_errors)}


def _only_reads(action: int, *_: object) -> int:
    return sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY


def _as_set(rows: list[tuple[Any, ...]]) -> list[str]:
    return sorted(map(repr, rows))
