"""A database that is waited for: addresses, transactions with retries, views, clear errors."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, Engine, Table, create_engine, event, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError, NoSuchModuleError

from trinity.common.errors import MissingExtraError, TrinityError
from trinity.common.schema.sql_schema import EXPERIENCE_VIEW, ROW_COLUMNS, TASK_VIEW
from trinity.utils.words import without_password

T = TypeVar("T")

_SCHEMA_LOCK = 0x7472696E  # any number; all processes of trinity take the same
_READS, _WRITES = {"only_reads": True}, {"only_reads": False}
_MYSQL = ("mysql", "mariadb")
_LOCK_S = 600.0  # to wait for another process that makes its tables
_NO_RETRY = (
    "disk is full",
    "not a database",
    "malformed",
    "readonly",
    "unable to open",
    "max_allowed_packet",
)


class DatabaseProblem(TrinityError):
    """A database can't be used: not there, foreign, damaged, locked for too long, or full."""


def database_url(path: str) -> str:
    """The address that ``path`` means; a plain path is a SQLite file."""
    if "://" not in path:
        return f"sqlite:///{path}"
    scheme, _, rest = path.partition("://")
    if scheme in ("postgres", "postgresql") and find_spec("psycopg2") is None:
        scheme = "postgresql+psycopg"  # the default of SQLAlchemy below 2.1 is psycopg2
    if scheme in _MYSQL:
        scheme += "+pymysql"
    return f"{scheme}://{rest}"


class Database:
    """One database. ``open`` -> transactions -> ``close``, or ``with``.

    Transactions that fail for want of a connection or of a lock are tried again, whole.

    Args:
        path: Address (`sqlite:///file.db`, `postgresql://...`, `mysql://...`), or the path of a
            SQLite file.
        max_retry_times: Further attempts.
        retry_interval_s: Seconds before the first of them; doubled each time.
        busy_timeout_s: Seconds SQLite waits for a lock within one attempt.
        must_exist: Refuse a SQLite file that is not there, instead of making one.
    """

    def __init__(
        self,
        path: str,
        *,
        max_retry_times: int = 3,
        retry_interval_s: float = 1.0,
        busy_timeout_s: float = 10.0,
        must_exist: bool = False,
    ) -> None:
        self.path = path
        self._shown = without_password(path)
        self._max_retry_times = max_retry_times
        self._retry_interval_s = retry_interval_s
        self._busy_timeout_s = busy_timeout_s
        self._must_exist = must_exist
        self._engine: Engine | None = None

    def open(self) -> None:
        """Connect once, so that a wrong address shows now."""
        if self._engine is not None:
            return
        self._engine = self._create()
        self.run(lambda connection: connection.execute(text("SELECT 1")))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()
        self._engine = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_sqlite(self) -> bool:
        assert self._engine is not None
        return self._engine.dialect.name == "sqlite"

    def run(
        self,
        work: Callable[[Connection], T],
        committed: Callable[[Connection], T | None] | None = None,
    ) -> T:
        """The result of ``work`` in a transaction that may write.

        Args:
            committed: Asked before another attempt whether the one before was committed after
                all (its answer was lost): then it returns the result, else None.

        Raises:
            DatabaseProblem: All attempts failed.
        """
        return self._attempt(work, committed, _WRITES)

    def read(self, work: Callable[[Connection], T]) -> T:
        """The result of ``work``, which reads only: on SQLite it does not wait for writers."""
        return self._attempt(work, None, _READS)

    def _attempt(
        self,
        work: Callable[[Connection], T],
        committed: Callable[[Connection], T | None] | None,
        options: dict[str, bool],
    ) -> T:
        assert self._engine is not None, "Database is not open"
        engine = self._engine.execution_options(**options)
        wait_s = self._retry_interval_s
        for attempt in range(self._max_retry_times + 1):
            try:
                with engine.begin() as connection:
                    found = committed(connection) if attempt and committed is not None else None
                    return work(connection) if found is None else found
            except DBAPIError as error:
                if attempt == self._max_retry_times or not _is_passing(error):
                    raise self._problem(error) from error
                time.sleep(wait_s)
                wait_s *= 2
        raise AssertionError("unreachable")

    def create(self, *tables: Table) -> None:
        """Create tables that are missing, and refresh the views over all of them."""

        def work(connection: Connection) -> None:
            with _locked_schema(connection):
                for table in tables:
                    self._check_columns(connection, table)
                for table in tables:
                    table.create(connection, checkfirst=True)
                _refresh_views(connection)

        self.run(work)

    def has_table(self, name: str) -> bool:
        return self.read(lambda connection: inspect(connection).has_table(name))

    def column_names(self, table: str) -> list[str]:
        """The columns of a table; none if there is no such table."""
        if not self.has_table(table):
            return []
        found = self.read(lambda connection: inspect(connection).get_columns(table))
        return [str(column["name"]) for column in found]

    def table_names(self) -> list[str]:
        """Names of the tables, views left out."""
        return self.read(lambda connection: sorted(inspect(connection).get_table_names()))

    def _check_columns(self, connection: Connection, table: Table) -> None:
        inspector = inspect(connection)
        if not inspector.has_table(table.name):
            return
        there = {column["name"] for column in inspector.get_columns(table.name)}
        missing = [column.name for column in table.columns if column.name not in there]
        if missing:
            raise DatabaseProblem(
                f"The table {table.name!r} of {self._shown} is not one of trinity's: it has no "
                f"column {missing[0]!r}. Give the buffer another name or path."
            )

    def _create(self) -> Engine:
        try:
            url = make_url(database_url(self.path))
            if url.get_backend_name() == "sqlite":
                return self._sqlite(url)
            # MySQL's own level would have those who write wait for those who read.
            return create_engine(url, pool_pre_ping=True, isolation_level="READ COMMITTED")
        except ModuleNotFoundError as error:
            package = error.name or "a driver"
            extra = "mysql" if url.get_backend_name() in _MYSQL else "postgresql"
            raise MissingExtraError(package, extra, f"The database {self._shown}") from None
        except (ArgumentError, NoSuchModuleError) as error:
            raise DatabaseProblem(
                f"{self._shown!r} is no address of a database ({error}). Write sqlite:///file.db, "
                "postgresql://user@host/name or mysql://user@host/name."
            ) from None

    def _sqlite(self, url: Any) -> Engine:
        if url.database and url.database != ":memory:":
            file = Path(url.database).expanduser()
            if self._must_exist and not file.is_file():
                raise DatabaseProblem(f"There is no database {self._shown!r}.")
            file.parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(url, connect_args={"timeout": self._busy_timeout_s})

        @event.listens_for(engine, "connect")
        def configure(connection: Any, _: object) -> None:
            connection.isolation_level = None  # BEGIN is ours, below
            cursor = connection.cursor()
            cursor.execute("PRAGMA journal_mode=WAL")
            cursor.execute("PRAGMA synchronous=NORMAL")
            cursor.close()

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            only_reads = connection.get_execution_options().get("only_reads")
            connection.exec_driver_sql("BEGIN" if only_reads else "BEGIN IMMEDIATE")

        return engine

    def _problem(self, error: DBAPIError) -> DatabaseProblem:
        cause = str(error.orig).strip().splitlines()[0] if error.orig else str(error)
        advice = {
            "not a database": "The file is no SQLite database, or damaged: move it away, or give "
            "another path.",
            "malformed": "The file is damaged: restore a copy, or give another path.",
            "is locked": "Another program holds it: end that, or wait.",
            "disk is full": "Make room on the disk; nothing of this write was kept.",
            "unable to open": "Is the folder there, and may you write to it?",
            "readonly": "You may not write to it.",
            "max_allowed_packet": "Raise max_allowed_packet of the server, or leave out what is "
            "larger (TRINITY_MAX_EXP_SIZE, in bytes).",
        }
        hints = [hint for mark, hint in advice.items() if mark in cause]
        return DatabaseProblem(
            f"The database {self._shown} can't be used: {cause}. {' '.join(hints)}"
        )


@contextmanager
def _locked_schema(connection: Connection) -> Iterator[None]:
    """One process at a time makes tables and views, whatever the database does by itself."""
    kind = connection.dialect.name
    if kind == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})"))
    if kind not in _MYSQL:  # SQLite's transactions wait for each other
        yield
        return
    connection.execute(text(f"SELECT GET_LOCK('{_SCHEMA_LOCK}', {_LOCK_S})"))
    try:
        yield
    except BaseException:
        connection.invalidate()  # the lock goes with it
        raise
    connection.execute(text(f"SELECT RELEASE_LOCK('{_SCHEMA_LOCK}')"))


def _is_passing(error: DBAPIError) -> bool:
    """Whether another attempt may succeed."""
    cause = str(error.orig)
    if any(mark in cause for mark in _NO_RETRY):
        return False
    is_lock = isinstance(error, DatabaseError) and ("locked" in cause or "deadlock" in cause)
    is_gone = error.connection_invalidated or type(error).__name__ in (
        "OperationalError",
        "InterfaceError",
    )
    return is_lock or is_gone


def _refresh_views(connection: Connection) -> None:
    """Make the views that the models query, over all buffers and task sets there are now."""
    inspector = inspect(connection)
    names = sorted(inspector.get_table_names())
    quote = connection.dialect.identifier_preparer.quote_identifier
    columns = ", ".join(f"r.{name}" for name in ROW_COLUMNS)
    buffers = [
        f"SELECT '{_escaped(name)}' AS buffer, {columns}, b.experience_bytes "
        f"FROM {quote(name)} r JOIN {quote(name + '_blob')} b ON b.id = r.id"
        for name in names
        if f"{name}_blob" in names
    ]
    tasks = [
        f"SELECT '{_escaped(name)}' AS taskset, t.id, t.raw_task FROM {quote(name)} t"
        for name in names
        if "raw_task" in {column["name"] for column in inspector.get_columns(name)}
    ]
    for view, parts in ((EXPERIENCE_VIEW, buffers), (TASK_VIEW, tasks)):
        connection.execute(text(f"DROP VIEW IF EXISTS {view}"))
        if parts:
            connection.execute(text(f"CREATE VIEW {view} AS " + " UNION ALL ".join(parts)))


def _escaped(name: str) -> str:
    return name.replace("'", "''").replace(":", "\\:")
