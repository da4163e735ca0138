from trinity.buffer.rows.base import (
    BadRow,
    BadRowError,
    DataError,
    ListRows,
    PickedRows,
    Row,
    Rows,
    iterate,
    lookup,
)
from trinity.buffer.rows.open import open_rows

__all__ = [
    "BadRow",
    "BadRowError",
    "DataError",
    "ListRows",
    "PickedRows",
    "Row",
    "Rows",
    "iterate",
    "lookup",
    "open_rows",
]
