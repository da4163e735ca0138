"""The Data-Juicer service as a process of ours."""

import asyncio
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from trinity.common.config.service import DataJuicerServiceConfig
from trinity.common.errors import DeadlineError, MissingExtraError
from trinity.service.data_juicer.client import DataJuicerClient, DataJuicerError

PYTHON_ENV = "TRINITY_DATA_JUICER_PYTHON"
"""Environment variable: the Python of an environment of its own that has Data-Juicer."""

DEFAULT_PORT = 5005
_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 10.0


class DataJuicerService:
    """Starts the service if the config says so, unless it runs already. ``start`` -> ``stop``.

    The service ends with the process that started it, also if that is killed.
    """

    def __init__(self, config: DataJuicerServiceConfig, log: Path | None = None) -> None:
        self._config = config
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address of the service, ours or the one the config names."""
        if self._config.server_url:
            return self._config.server_url
        return f"http://127.0.0.1:{self._config.port or DEFAULT_PORT}"

    async def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            DataJuicerError: It ended at once.
            DeadlineError: It doesn't answer.
            MissingExtraError: Data-Juicer is not installed.
        """
        client = DataJuicerClient(self.url, [])
        if not self._config.auto_start or await client.is_healthy():
            return
        self._process = self._spawn()
        for _ in range(int(_START_TIMEOUT_S / 0.2)):
            if await client.is_healthy():
                return
            if self._process.poll() is not None:
                raise DataJuicerError(self._why_it_ended())
            await asyncio.sleep(0.2)
        raise DeadlineError("the Data-Juicer service", "its start", _START_TIMEOUT_S)

    async def stop(self) -> None:
        """End the service, if it is ours."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            await asyncio.to_thread(_wait_for_end, process)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        port = self.url.rsplit(":", 1)[-1].strip("/")
        command = [_python(), "-m", "trinity.service.data_juicer.server", "--with-parent"]
        root = str(Path(__file__).parents[3])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        with self._log_file() as log:
            return subprocess.Popen(
                [*command, "--port", port],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )

    def _log_file(self) -> IO[bytes]:
        if self._log is None:
            return open(os.devnull, "ab")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        return self._log.open("ab")

    def _why_it_ended(self) -> str:
        text = f"The Data-Juicer service at {self.url} ended at once."
        if self._log is not None and self._log.exists():
            lines = self._log.read_text(errors="replace").strip().splitlines()
            text += f" Its last words: {lines[-1]}" if lines else ""
        return text


def _wait_for_end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None, "it was started with one"
    process.stdin.close()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _python() -> str:
    """The Python that has Data-Juicer."""
    named = os.environ.get(PYTHON_ENV)
    if named:
        return named
    if find_spec("data_juicer") is None:
        raise MissingExtraError("data_juicer", "data", "service.data_juicer")
    return sys.executable
