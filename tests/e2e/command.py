"""`trinity run` as a person starts it: a process of its own, its screen, and all it started."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml

T = TypeVar("T")

_MARK = "TRINITY_TEST_RUN"


@dataclass
class Command:
    """A running or ended `trinity run`.

    Args:
        config: Its configuration file; the screen goes to a file beside it.
        mark: In the environment of all its processes, by which they are found.
    """

    config: Path
    process: subprocess.Popen[bytes]
    mark: str
    screen_path: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def job(self) -> Path:
        """The folder of the job."""
        config = yaml.safe_load(self.config.read_text())
        return Path(config["checkpoint_root_dir"]) / config["project"] / config["name"]

    @property
    def screen(self) -> str:
        return self.screen_path.read_text(errors="replace")

    @property
    def last_lines(self) -> str:
        """What a person sees last."""
        return "\n".join(self.screen.rstrip().splitlines()[-4:])

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.job / "summary.json").read_text())

    def log(self, part: str) -> str:
        """The log of a part; "" if there is none yet."""
        path = self.job / "log" / f"{part}.log"
        return path.read_text() if path.exists() else ""

    def wait(self, timeout_s: float = 500) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"Not done after {timeout_s} s:\n{self.screen}") from None

    def succeed(self, timeout_s: float = 500) -> "Command":
        """Wait for its end, which must be a good one."""
        code = self.wait(timeout_s)
        assert code == 0, f"exit code {code}:\n{self.screen}"
        return self

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def wait_for(self, find: Callable[[], T | None], what: str, timeout_s: float = 400) -> T:
        """What ``find`` gives once it gives something true, while the command runs."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := find():
                return found
            assert self.process.poll() is None, f"ended before there was {what}:\n{self.screen}"
            time.sleep(0.05)
        raise AssertionError(f"no {what} after {timeout_s} s:\n{self.screen}")

    def wait_for_step(self, step: int) -> None:
        """Until the trainer has done ``step``."""
        self.wait_for(lambda: f"Step {step}:" in self.log("trainer"), f"training step {step}")

    def pid_of(self, part: str) -> int:
        """Process of a part, by the log file that it has open."""
        path = str(self.job / "log" / f"{part}.log")

        def find() -> int | None:
            for process in processes_of(self.mark):
                with suppress(psutil.Error):
                    is_own = process.pid != self.process.pid
                    if is_own and any(file.path == path for file in process.open_files()):
                        return process.pid
            return None

        return self.wait_for(find, f"process of {part}")

    def remaining(self, grace_s: float = 60) -> list[str]:
        """What of its processes is left some seconds after its end."""
        deadline = time.monotonic() + grace_s
        while (left := processes_of(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [" ".join(process.cmdline())[:120] for process in left]


def processes_of(mark: str) -> list[psutil.Process]:
    """All living processes with ``mark`` in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == mark and process.status() != "zombie":
                found.append(process)
    return found


@contextmanager
def trinity_run(
    config: Path,
    *overrides: str,
    plugins: Path | None = None,
    env: Mapping[str, str] | None = None,
    command: str = "run",
) -> Iterator[Command]:
    """Start ``command`` of `trinity` on ``config``; whatever is left of it at the end is killed."""
    mark = uuid.uuid4().hex
    screen_path = config.with_suffix(f".{mark[:6]}.txt")
    arguments = ["--plugin-dir", str(plugins)] if plugins else []
    with screen_path.open("wb") as screen:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "trinity.cli.launcher", *command.split()),
                *("--config", str(config), *arguments, *overrides),
            ],
            stdout=screen,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_environment(mark, env or {}),
            start_new_session=True,
        )
    try:
        yield Command(config, process, mark, screen_path)
    finally:
        for left in processes_of(mark):
            with suppress(psutil.Error):
                left.kill()
        process.wait(60)


def _environment(mark: str, extra: Mapping[str, str]) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "TRINITY_", "OMP_"))}
    return {**kept, _MARK: mark, "COLUMNS": "200", **extra}
