"""A real disk that fills up: tmpfs of a given size, which takes root to mount."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A disk of ``size`` (as "2m") at the new ``folder``; skips the test where it can't be had."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting takes root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
