"""Rows of JSON-lines files: only the places of the lines are in memory."""

import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from trinity.buffer.rows.base import BadRow, BadRowError, Row, first_columns

_CHUNK_BYTES = 2**20


class _File:
    """One file and where its rows are. Blank lines are no rows."""

    _descriptor: tuple[int, int] | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        ends = _newlines(path)
        starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1] + 1])
        is_row = ends - starts > 1  # shorter than "{}" is blank, or a lone carriage return
        self.starts, self.ends = starts[is_row], ends[is_row]
        self.lines = None if is_row.all() else np.flatnonzero(is_row)

    def __len__(self) -> int:
        return len(self.starts)

    def line_number(self, index: int) -> int:
        return 1 + int(index if self.lines is None else self.lines[index])

    def read(self, index: int) -> bytes:
        start, end = int(self.starts[index]), int(self.ends[index])
        return os.pread(self._open(), end - start, start)

    def _open(self) -> int:
        if self._descriptor is None or self._descriptor[0] != os.getpid():
            self._descriptor = os.getpid(), os.open(self.path, os.O_RDONLY)
        return self._descriptor[1]

    def close(self) -> None:
        if self._descriptor is not None and self._descriptor[0] == os.getpid():
            os.close(self._descriptor[1])
        self._descriptor = None

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_descriptor": None}


class JsonLines:
    """The lines of some files, one after the other, as rows.

    Opening reads the files once to find the lines (about 1 GB a second) and keeps 16 bytes a row.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [_File(path) for path in paths]
        self._firsts = np.cumsum([0, *map(len, self._files)]).tolist()

    @cached_property
    def columns(self) -> list[str]:
        return first_columns(self)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> Row:
        file, local = self._locate(index)
        try:
            row = json.loads(file.read(local))
        except UnicodeDecodeError as error:
            raise self._bad(index, f"not UTF-8, which it has to be ({error.reason})") from None
        except ValueError as error:
            raise self._bad(index, f"not JSON ({error})") from None
        if not isinstance(row, dict):
            raise self._bad(index, f"a JSON {type(row).__name__}, not an object")
        return row

    def where(self, index: int) -> str:
        file, local = self._locate(index)
        return f"{file.path.name}, line {file.line_number(local)}"

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _bad(self, index: int, reason: str) -> BadRowError:
        return BadRowError([BadRow(self.where(index), "", reason)])

    def _locate(self, index: int) -> tuple[_File, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._firsts, index) - 1
        return self._files[number], index - self._firsts[number]


def _newlines(path: Path) -> np.ndarray:
    """Offset of each line's end, the last line's end included if it has no newline."""
    found, offset = [], 0
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            found.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == 10) + offset)
            offset += len(chunk)
    ends = np.concatenate([np.empty(0, dtype=np.int64), *found])
    if offset and (not len(ends) or ends[-1] != offset - 1):
        ends = np.append(ends, offset)
    return ends
