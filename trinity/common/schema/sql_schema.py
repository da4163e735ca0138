"""Tables of experiences and tasks in a database, and the models to query them by.

A buffer called `b` has the tables `b` (a row an experience, readable by anyone), `b_blob` (its
bytes) and `b_ledger` (who wrote and read what). A set of tasks is one table. `ExperienceModel` and
`TaskModel` query the rows of all buffers and task sets of a database at once, through two views.
"""

from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    JSON,
    Column,
    DateTime,
    Double,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    func,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from trinity.common.experience import Experience

EXPERIENCE_VIEW = "trinity_experiences"
TASK_VIEW = "trinity_tasks"
ROW_COLUMNS = (
    "id",
    "timestamp",
    "task_id",
    "run_id",
    "msg_id",
    "model_version",
    "reward",
    "consumed",
)
# As large and as exact as elsewhere: MySQL's own are of 64 KiB, and of 32 bits.
_Blob = LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
_LongText = Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
_Number = Float().with_variant(Double(), "mysql", "mariadb")
_EXACT_TEXT: dict[str, Any] = {  # upper and lower case are not the same
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_bin",
}
WITHDRAWN = -1
"""`consumed` of a row that a resume took back: it is never read."""


class _Base(DeclarativeBase):
    """Base of the models."""


class ExperienceModel(_Base):
    """A row of any buffer in the database. Changing `reward` changes what is read back."""

    __tablename__ = EXPERIENCE_VIEW

    buffer: Mapped[str] = mapped_column(String, primary_key=True)
    """Name of the buffer."""

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    """Row in the buffer, in the order of writing."""

    timestamp: Mapped[datetime | None] = mapped_column(DateTime)
    """When it was written."""

    task_id: Mapped[str | None] = mapped_column(String)
    run_id: Mapped[int | None] = mapped_column(Integer)
    msg_id: Mapped[str | None] = mapped_column(String)
    model_version: Mapped[int | None] = mapped_column(Integer)
    """Version of the weights that sampled it."""

    reward: Mapped[float | None] = mapped_column(Float)
    consumed: Mapped[int] = mapped_column(Integer)
    """Times it was read; -1 if a resume took it back."""

    experience_bytes: Mapped[bytes] = mapped_column(LargeBinary)

    def to_experience(self, blob_bytes: bytes | None = None) -> Experience:
        """The experience; its bytes are the row's own unless others are given."""
        return experience_of_row(self, self.experience_bytes if blob_bytes is None else blob_bytes)


class TaskModel(_Base):
    """A row of any set of tasks in the database."""

    __tablename__ = TASK_VIEW

    taskset: Mapped[str] = mapped_column(String, primary_key=True)
    """Name of the set."""

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    raw_task: Mapped[dict[str, Any]] = mapped_column(JSON)
    """The row as the data set has it."""


class BufferTables(NamedTuple):
    """The tables of one buffer."""

    rows: Table
    blobs: Table
    ledger: Table


@cache
def buffer_tables(name: str) -> BufferTables:
    """The tables of the buffer ``name``."""
    metadata = MetaData()
    rows = Table(
        name,
        metadata,
        Column("id", Integer, primary_key=True, autoincrement=True),
        Column("timestamp", DateTime, server_default=func.now()),
        Column("task_id", String(256), index=True),
        Column("run_id", Integer, index=True),
        Column("msg_id", String(64), index=True),
        Column("model_version", Integer, index=True),
        Column("reward", _Number, index=True),
        Column("consumed", Integer, nullable=False, server_default="0"),
        Index(f"ix_{name}_order", "consumed", "id"),
        **_EXACT_TEXT,
    )
    blobs = Table(
        f"{name}_blob",
        metadata,
        Column("id", Integer, primary_key=True, autoincrement=False),
        Column("experience_bytes", _Blob, nullable=False),
    )
    ledger = Table(
        f"{name}_ledger",
        metadata,
        Column("seq", Integer, primary_key=True, autoincrement=True),
        Column("token", String(32), unique=True, nullable=False),
        Column("run", String(256), nullable=False, index=True),
        Column("kind", String(16), nullable=False, index=True),
        Column("number", Integer, nullable=False),
        Column("ids", _LongText, nullable=False),
        Column("writes", Integer),
        Column("reads", Integer),
        Column("reason", String(256), nullable=False, server_default=""),
        Column("timestamp", DateTime, server_default=func.now()),
        **_EXACT_TEXT,
    )
    return BufferTables(rows, blobs, ledger)


@cache
def task_table(name: str) -> Table:
    """The table of the set of tasks ``name``."""
    return Table(
        name,
        MetaData(),
        Column("id", Integer, primary_key=True, autoincrement=True),
        Column("raw_task", JSON, nullable=False),
        **_EXACT_TEXT,
    )


def row_of_experience(experience: Experience) -> dict[str, Any]:
    """The readable columns of an experience."""
    version = experience.info.get("model_version")
    return {
        "task_id": str(experience.eid.task),
        "run_id": int(experience.eid.run),
        "msg_id": experience.eid.suffix,
        "model_version": version if isinstance(version, int) else None,
        "reward": experience.reward,
    }


def experience_of_row(row: Any, blob: bytes) -> Experience:
    """An experience from its bytes; what the readable columns say of it wins.

    Raises:
        ValueError: The bytes are no experience.
    """
    experience = Experience.deserialize(blob)
    eid = experience.eid
    if row.task_id is not None and row.task_id != str(eid.task):
        eid.task = row.task_id
    if row.run_id is not None:
        eid.run = row.run_id
    if row.msg_id is not None:
        eid.suffix = row.msg_id
    experience.reward = row.reward
    if row.model_version is not None:
        experience.info["model_version"] = row.model_version
    return experience
