"""A Ray cluster as a person starts it, with `ray start --head`, for one test."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.ports import free_port

_MARK = "TRINITY_TEST_RAY_HEAD"


@contextmanager
def ray_head(num_cpus: int = 1) -> Iterator[str]:
    """Its address; all its processes are killed at the end. RAY_TMPDIR, if set, is its place."""
    own = None if "RAY_TMPDIR" in os.environ else tempfile.mkdtemp(prefix="r", dir="/tmp")
    place = own or os.environ["RAY_TMPDIR"]  # its path must be short
    port = free_port()
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}"]
    command += [f"--num-cpus={num_cpus}", "--include-dashboard=false", "--disable-usage-stats"]
    mark = uuid.uuid4().hex  # others may have the same place
    env = {**os.environ, "RAY_TMPDIR": place, _MARK: mark}
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=300, env=env)
        yield f"127.0.0.1:{port}"
    finally:
        killed = [process for process in psutil.process_iter() if _is_marked(process, mark)]
        for process in killed:
            with suppress(psutil.Error):
                process.kill()
        while any(map(_lives, killed)):
            time.sleep(0.01)
        if own:
            shutil.rmtree(own, ignore_errors=True)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(_MARK) == mark
    except psutil.Error:
        return False
