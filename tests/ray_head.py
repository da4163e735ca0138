"""A Ray cluster as a person starts it, with `ray start --head`, for one test."""

import os
import shutil
import subprocess
import sys
import tempfile
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
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_MARK) == mark:
                    process.kill()
        if own:
            shutil.rmtree(own, ignore_errors=True)
