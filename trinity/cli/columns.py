"""How wide the columns of a table are, so that none breaks a word: a key is there to be copied."""

from collections.abc import Sequence
from shutil import get_terminal_size

_FRAME, _FRAME_PER_COLUMN = 1, 3


def column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Characters of each column: its longest word at least, its longest cell if there is room.

    What the terminal has left goes to the columns whose cells need the most lines. One that has
    no room for the words breaks them all the same.
    """
    columns = list(zip(*rows, strict=True))
    wanted = [max(map(len, cells)) for cells in columns]
    widths = [max(map(len, " ".join(cells).split())) for cells in columns]
    room = get_terminal_size().columns - _FRAME - _FRAME_PER_COLUMN * len(columns)
    for _ in range(min(room, sum(wanted)) - sum(widths)):
        fullest = max(range(len(columns)), key=lambda i: wanted[i] / widths[i])
        widths[fullest] += 1
    return widths
