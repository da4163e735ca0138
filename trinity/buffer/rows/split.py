"""How a split is written: a name, a part of one (`train[10%:20%]`), or a sum (`a+b`)."""

import re
from dataclasses import dataclass

from trinity.buffer.rows.base import DataError

_SLICE = re.compile(r"^(?P<name>[^\[\]]+)(?:\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?$")


@dataclass(frozen=True)
class SplitPart:
    """One summand: a split by name, and which of its rows."""

    name: str
    start: str | None = None
    stop: str | None = None

    @property
    def is_whole(self) -> bool:
        return self.start is None and self.stop is None

    def range(self, size: int) -> range:
        """The rows it means of a split of ``size`` rows."""
        start, stop = _edge(self.start, size, 0), _edge(self.stop, size, size)
        return range(start, max(start, stop))


def parse_split(split: str) -> list[SplitPart]:
    """The parts of ``split`` in order.

    Raises:
        DataError: It is written otherwise.
    """
    return [_parse_part(part.strip()) for part in split.split("+")]


def _parse_part(split: str) -> SplitPart:
    match = _SLICE.match(split)
    if match is None:
        raise DataError(
            f"{split!r} is no split. Write a name, 'train[:100]', 'train[10%:20%]' or 'a+b'.",
            key="split",
        )
    return SplitPart(match["name"], match["start"], match["stop"])


def _edge(text: str | None, size: int, default: int) -> int:
    if text is None:
        return default
    edge = round(int(text[:-1]) * size / 100) if text.endswith("%") else int(text)
    return min(max(edge + size if edge < 0 else edge, 0), size)
