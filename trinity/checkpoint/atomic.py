"""Files and folders that appear whole or not at all."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: In a finished checkpoint: the size of each of its files, as JSON.
MARKER = ".full_checkpoint"
_SAVING = ".saving"

#: Of a small file of a checkpoint; a call, which any thread may make, where it takes long.
Content = str | bytes | Callable[[], bytes]


def write_text(path: Path, text: str) -> None:
    """Replace the file at ``path``; a reader sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}{_SAVING}")
    try:
        with aside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def aside_of(folder: Path) -> Path:
    """Where ``folder`` is written before it is whole."""
    return folder.with_name(f".{folder.name}{_SAVING}")


@contextmanager
def writing_folder(folder: Path) -> Iterator[Path]:
    """Write into the folder given; at the end of the block it becomes ``folder``.

    An error inside the block leaves an earlier ``folder`` as it was and removes what was written.
    """
    aside = begin_folder(folder)
    try:
        yield aside
        finish_folder(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def begin_folder(folder: Path) -> Path:
    """An empty folder to write into; `finish_folder` makes it ``folder``."""
    aside = aside_of(folder)
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    return aside


def abandon_folder(folder: Path) -> None:
    """Remove what was written in place of ``folder``."""
    shutil.rmtree(aside_of(folder), ignore_errors=True)


def finish_folder(folder: Path) -> None:
    """Bring all files to disk, note their sizes, and put the folder in place."""
    aside = aside_of(folder)
    files = [path for path in sorted(aside.rglob("*")) if path.is_file()]
    for path in files:
        _sync(path)
    sizes = {str(path.relative_to(aside)): path.stat().st_size for path in files}
    write_text(aside / MARKER, json.dumps(sizes, indent=1))
    old = folder.with_name(f".{folder.name}.old{_SAVING}")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    _sync(folder.parent)


def faults(folder: Path) -> list[str]:
    """What is missing or cut in a folder with a marker; empty if it is whole."""
    try:
        sizes = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError) as error:
        return [f"{MARKER} can't be read ({error})"]
    found = []
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != size:
            found.append(f"{name} has {path.stat().st_size} of {size} bytes")
    return found


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
