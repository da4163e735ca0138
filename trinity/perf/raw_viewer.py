"""The page of a table of raw rows: tasks, or data of SFT and DPO. Run by `trinity view`."""

from __future__ import annotations

import json
from typing import Any

import streamlit as st

from trinity.common.schema.database import Database
from trinity.common.schema.tables import TaskTable

COLUMN = "raw_task"
"""What tells such a table from a buffer of experiences."""

_PER_PAGE = 10
_TITLE_LENGTH = 80


class RowsViewer:
    """The page of one table.

    Args:
        url: Address of the database, or the path of a SQLite file.
        table: Its name.
    """

    def __init__(self, url: str, table: str) -> None:
        self.database = Database(url, must_exist=True)
        self.table = TaskTable(table)

    def main(self) -> None:
        """Draw the page."""
        st.set_page_config(page_title="trinity view", layout="wide")
        st.title(f"Rows of {self.table.table.name}")
        with self.database as database:
            offset = offset_of_page(database.read(self.table.count), "rows")
            rows = database.read(lambda c: self.table.page(c, offset, _PER_PAGE))
        for number, row in rows:
            with st.expander(f"{number}: {_title(row)}", expanded=True):
                _show(row)


def offset_of_page(count: int, what: str) -> int:
    """The first row of the page that the reader chose of ``count`` rows."""
    pages = max(1, -(-count // _PER_PAGE))
    page = st.number_input(f"Page of {pages}", 1, pages, key="page") if pages > 1 else 1
    st.caption(f"{count:,} {what}")
    return (int(page) - 1) * _PER_PAGE


def _title(row: Any) -> str:
    """The begin of the first text of a row."""
    first = next((text for text in map(_text, _parts(row)) if text), "")
    line = " ".join(first.split())
    return line if len(line) <= _TITLE_LENGTH else f"{line[:_TITLE_LENGTH]}..."


def _show(row: Any) -> None:
    """Texts and messages as they are, the rest as JSON."""
    for label, value in _parts(row):
        st.caption(label)
        st.code(_text((label, value)), language=None, wrap_lines=True)


def _parts(row: Any) -> list[tuple[str, Any]]:
    """The fields of a row by name, each message of a conversation by itself."""
    if not isinstance(row, dict):
        return [("row", row)]
    parts: list[tuple[str, Any]] = []
    for key, value in row.items():
        if _is_conversation(value):
            parts += [(f"{key}: {turn['role']}", turn.get("content")) for turn in value]
        else:
            parts.append((key, value))
    return parts


def _is_conversation(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(turn, dict) and "role" in turn for turn in value)


def _text(part: tuple[str, Any]) -> str:
    value = part[1]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
