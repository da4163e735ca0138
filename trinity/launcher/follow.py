"""Reading the logs of a job while it runs: new lines of all files, as they come."""

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
CONTEXT = 5
"""Lines shown before and after one that matches a search."""
_EVERY_S = 0.5


class Line(NamedTuple):
    """A line of a log, and the file it stands in, without `.log`."""

    source: str
    text: str

    @property
    def level(self) -> str | None:
        """Its level; None for one that other programs wrote."""
        word = self.text.partition(" ")[0]
        return word if word in LEVELS else None


@dataclass
class Follower:
    """Gives the lines that came since it was last asked, file by file.

    Files may appear later, also in folders below (`log.group_by_node`). One that got shorter was
    begun anew and is read from its start.

    Args:
        folder: `<job>/log`.
        last: Lines of each file to begin with; None: all of them.
    """

    folder: Path
    last: int | None = 0
    _places: dict[Path, int] = field(default_factory=dict)
    _is_begun: bool = False

    def read(self) -> Iterator[Line]:
        """All whole lines that are new."""
        for path in sorted(self.folder.rglob("*.log")):
            with suppress(FileNotFoundError):  # it was rotated away meanwhile
                yield from self._read_file(path)
        self._is_begun = True

    def _read_file(self, path: Path) -> Iterator[Line]:
        place = self._places.get(path, 0)
        is_first = path not in self._places and not self._is_begun
        if path.stat().st_size < place:
            place = 0
        with path.open("rb") as stream:
            stream.seek(place)
            data = stream.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._places[path] = place + len(whole)
        lines = whole.decode("utf-8", errors="replace").splitlines()
        if is_first and self.last is not None:
            lines = lines[len(lines) - min(self.last, len(lines)) :]
        name = str(path.relative_to(self.folder).with_suffix(""))
        yield from (Line(name, line) for line in lines)


@contextmanager
def saying(folders: Iterable[Path], say: Callable[[str], None]) -> Iterator[None]:
    """Say each line that is written below ``folders`` while the block lasts."""
    followers, is_over = [Follower(folder) for folder in folders], threading.Event()

    def say_new() -> None:
        for follower in followers:
            with suppress(OSError):  # a file went away between two looks
                for line in follower.read():
                    say(f"{line.source}: {line.text}")

    def follow() -> None:
        while not is_over.wait(_EVERY_S):
            say_new()

    for follower in followers:
        deque(follower.read(), maxlen=0)  # what is there is of earlier runs
    thread = threading.Thread(target=follow, name="logs on the screen", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        say_new()


def is_wanted(line: Line, level: str = "INFO", keyword: str = "") -> bool:
    """Whether ``line`` is of ``level`` or above, or of no known one, and has ``keyword`` in it."""
    own = line.level
    is_loud = own is None or LEVELS.index(own) >= LEVELS.index(level)
    return is_loud and keyword in line.text


def search(folder: Path, pattern: str) -> Iterator[list[Line]]:
    """The lines that match a regular expression, with those around them, a block for each place."""
    found = re.compile(pattern)
    by_file: dict[str, list[Line]] = {}
    for line in Follower(folder, last=None).read():
        by_file.setdefault(line.source, []).append(line)
    for lines in by_file.values():
        block: list[int] = []
        for place in (i for i, line in enumerate(lines) if found.search(line.text)):
            around = range(max(0, place - CONTEXT), min(len(lines), place + CONTEXT + 1))
            if block and around.start > block[-1] + 1:
                yield [lines[i] for i in block]
                block = []
            block += [i for i in around if not block or i > block[-1]]
        if block:
            yield [lines[i] for i in block]
