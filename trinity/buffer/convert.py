"""Data sets from one form into another: JSON lines, Parquet, tables of a database."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trinity.buffer.rows import DataError, Row, Rows, open_rows
from trinity.buffer.schema.experience import PAYLOAD_KEY, SavedExperienceFormatter, to_row
from trinity.common.constants import StorageType
from trinity.common.experience import Experience

if TYPE_CHECKING:
    from trinity.common.schema.database import Database

Kind = Literal["tasks", "experiences"]
_CHUNK_ROWS = 500


def is_database(path: str) -> bool:
    """Whether a path means a database: an address, or a SQLite file."""
    return "://" in path or path.endswith((".db", ".sqlite", ".sqlite3"))


def convert(
    source: str,
    target: str,
    *,
    split: str = "train",
    subset: str | None = None,
    table: str = "",
    target_table: str = "",
) -> tuple[Kind, int]:
    """Copy a data set into another form; what it holds and how many rows.

    Experiences keep every tensor. Rows are read and written in chunks.

    Args:
        source: File, folder, hub name or database.
        target: `.jsonl`, `.parquet`, or a database. Files must not exist; a table is added to.
        table: Table of ``source``; may be left out if there is only one.
        target_table: Table of ``target``; as ``table`` if left out.

    Raises:
        DataError: The source can't be read, or the target is taken or of no known form.
    """
    name, chunks, kind = _chunks(source, split, subset, table)
    target_table = target_table or name
    if is_database(target):
        return kind, _into_database(target, target_table, chunks, kind)
    path = Path(target)
    if path.exists():
        raise DataError(f"{target!r} exists already. Move it away, or name another file.")
    writers: dict[str, Callable[[Path, Iterator[list[Row]]], int]] = {
        ".jsonl": _into_jsonl,
        ".parquet": _into_parquet,
    }
    writer = writers.get(path.suffix)
    if writer is None:
        raise DataError(f"{target!r} ends in none of .jsonl, .parquet, .db; nor is it an address.")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.writing")
    try:
        count = writer(aside, chunks)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return kind, count


def _chunks(
    source: str, split: str, subset: str | None, table: str
) -> tuple[str, Iterator[list[Row]], Kind]:
    """A name for what is read, its rows in chunks, and what they are."""
    if is_database(source):
        return _of_database(source, table)
    rows = open_rows(source, split=split, subset=subset)
    kind: Kind = "experiences" if PAYLOAD_KEY in rows.columns else "tasks"
    return Path(source).stem, _in_chunks(rows), kind


def _in_chunks(rows: Rows) -> Iterator[list[Row]]:
    for start in range(0, len(rows), _CHUNK_ROWS):
        yield [rows[i] for i in range(start, min(start + _CHUNK_ROWS, len(rows)))]


def _of_database(source: str, table: str) -> tuple[str, Iterator[list[Row]], Kind]:
    from trinity.common.schema.database import Database

    database = Database(source, must_exist=True)
    database.open()
    names = database.table_names()
    table = _table_of(source, names, table)
    if f"{table}_blob" not in names:
        rows = open_rows(source, storage_type=StorageType.SQL, table=table)
        return table, _in_chunks(rows), "tasks"
    return table, _experiences_in_chunks(database, table), "experiences"


def _table_of(source: str, names: Sequence[str], table: str) -> str:
    """The table that is meant: ``table``, or the only one if that is empty."""
    sets = [name for name in names if not name.endswith(("_blob", "_ledger"))]
    if not table and len(sets) == 1:
        return sets[0]
    if table not in sets:
        wanted = f"has no table {table!r}" if table else "has several tables"
        raise DataError(f"{source!r} {wanted}. Name one of: {', '.join(sets) or 'none'}.")
    return table


def _experiences_in_chunks(database: "Database", table: str) -> Iterator[list[Row]]:
    """Those of a buffer; ``database`` is closed behind them."""
    from trinity.common.schema.tables import ExperienceTables

    tables, start = ExperienceTables(table), 0
    while found := database.read(partial(tables.query, offset=start, limit=_CHUNK_ROWS)):
        yield [to_row(stored.experience) for stored in found]
        start += len(found)
    database.close()


def _into_jsonl(path: Path, chunks: Iterator[list[Row]]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as stream:
        for rows in chunks:
            stream.writelines(f"{_json(row)}\n" for row in rows)
            count += len(rows)
    return count


def _json(row: Row) -> str:
    try:
        text = json.dumps(row, ensure_ascii=False)
    except TypeError as error:
        raise DataError(f"A row can't be JSON: {error}. Write .parquet instead.") from None
    is_whole = text.encode("utf-8", "ignore").decode() == text
    return text if is_whole else json.dumps(row)  # half a character can stand as an escape alone


def _into_parquet(path: Path, chunks: Iterator[list[Row]]) -> int:
    import pyarrow as pa
    import pyarrow.parquet

    writer = None
    columns: list[str] = []
    count = 0
    try:
        for rows in chunks:
            flat = [_flat(row) for row in rows]
            columns = columns or list(dict.fromkeys(name for row in flat for name in row))
            even = [_in_columns(row, columns) for row in flat]
            try:
                schema = writer.schema if writer is not None else None
                table = pa.Table.from_pylist(even, schema=schema)
                if writer is None:
                    writer = pyarrow.parquet.ParquetWriter(path, table.schema)
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise DataError(
                    f"The values of a column differ in type from row to row: {error}. "
                    "Write .jsonl instead."
                ) from None
            except (pa.ArrowException, OverflowError, UnicodeError) as error:
                told = f"{error}".rstrip(".")
                raise DataError(
                    f"Parquet can't hold a row: {told}. Write .jsonl instead."
                ) from None
            writer.write_table(table)
            count += len(rows)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise DataError("There are no rows, and so no columns that Parquet could have.")
    return count


def _in_columns(row: Row, columns: Sequence[str]) -> Row:
    """The row with null where it has no value: Arrow takes the names of the first row alone."""
    new = [name for name in row if name not in columns]
    if new:
        raise DataError(
            f"A row has {new[0]!r}, which the first {_CHUNK_ROWS} rows have not. "
            "Write .jsonl instead."
        )
    return {name: row.get(name) for name in columns}


def _flat(row: Row) -> Row:
    """Of an experience, what differs from row to row in form goes into one column as JSON."""
    if PAYLOAD_KEY not in row:
        return row
    uneven = {"eid", "info", "metrics", "messages", "tools"}
    return {k: json.dumps(v, default=str) if k in uneven else v for k, v in row.items()}


def _into_database(path: str, table: str, chunks: Iterator[list[Row]], kind: Kind) -> int:
    if kind == "experiences":
        return asyncio.run(_experiences_into(path, table, chunks))
    from trinity.buffer.rows.sql import write_tasks

    count = 0
    for rows in chunks:
        write_tasks(path, table, rows)
        count += len(rows)
    return count


async def _experiences_into(path: str, table: str, chunks: Iterator[list[Row]]) -> int:
    from trinity.buffer.storage.sql import SQLStorage

    storage = SQLStorage(table, path)
    await storage.prepare()
    await storage.acquire()
    count = 0
    try:
        for rows in chunks:
            await storage.put(_experiences(rows))
            count += len(rows)
    finally:
        await storage.release()
        await storage.close()
    return count


def _experiences(rows: Sequence[Row]) -> list[Experience]:
    formatter: Any = SavedExperienceFormatter()
    return [formatter.format(row) for row in rows]
