"""What a run uses while it goes: processors, memory, GPUs, and what waits in its engines."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from trinity.common.models.protocol import InferenceEngine
from trinity.launcher.hardware import local_gpus

Sample = dict[str, object]

_MB = 2**20
_GPU_FIGURES = ("utilization.gpu", "memory.used", "memory.total")
_GPU_NAMES = ("utilization_percent", "memory_mb", "memory_total_mb")
_PATIENCE_S = 5.0  # with an engine or a driver that doesn't answer


class Machine:
    """Processors and memory of this machine, and of this process and all below it."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._at = 0.0
        self._busy = self._all = 0.0
        self._has_gpus = local_gpus() > 0 and shutil.which("nvidia-smi") is not None
        self.sample()  # use counts from here

    def sample(self) -> Sample:
        """The figures of now; use of processors is that since the last call."""
        seconds, resident = self._family()
        now = time.monotonic()
        used = sum(spent - self._seconds.get(pid, 0.0) for pid, spent in seconds.items())
        cores = used / max(now - self._at, 1e-9)
        self._seconds, self._at = seconds, now
        memory = psutil.virtual_memory()
        return {
            "cpu_percent": self._machine_percent(),
            "run_cpu_cores": round(cores, 3),
            "run_memory_mb": round(resident / _MB, 1),
            "machine_memory_mb": round((memory.total - memory.available) / _MB, 1),
            "gpus": _gpus() if self._has_gpus else [],
        }

    def _machine_percent(self) -> float:
        """Use of all processors since the last call; psutil's own is that of the calling thread."""
        times = psutil.cpu_times()
        whole = sum(times) - getattr(times, "guest", 0) - getattr(times, "guest_nice", 0)
        busy = whole - times.idle - getattr(times, "iowait", 0)
        percent = 100 * (busy - self._busy) / max(whole - self._all, 1e-9)
        self._busy, self._all = busy, whole
        return round(min(max(percent, 0.0), 100.0), 1)

    def _family(self) -> tuple[dict[int, float], int]:
        """Seconds of processor time by process, and bytes resident in all."""
        seconds: dict[int, float] = {}
        resident = 0
        own = psutil.Process()
        for process in [own, *own.children(recursive=True)]:
            try:
                times, memory = process.cpu_times(), process.memory_info().rss
            except psutil.Error:  # it has ended
                continue
            seconds[process.pid] = times.user + times.system
            resident += memory
        return seconds, resident


def _gpus() -> list[dict[str, float]]:
    """Use of each GPU of this machine; none if the driver doesn't answer."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIGURES)}"]
    command.append("--format=csv,noheader,nounits")
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
        return parse_gpus(told.stdout)
    except (OSError, subprocess.TimeoutExpired):
        return []


def parse_gpus(text: str) -> list[dict[str, float]]:
    """The lines of `nvidia-smi` as figures; one it can't tell (``[N/A]``) is left out."""
    rows = [dict(zip(_GPU_NAMES, line.split(", "), strict=False)) for line in text.splitlines()]
    return [
        {name: float(value) for name, value in row.items() if value.strip().isdigit()}
        for row in rows
    ]


@dataclass
class Sampler:
    """Takes samples of machine and engines until it is cancelled.

    Args:
        engines: Whose `health` is asked.
        every_s: Seconds between two samples.
        started: `time.time` of the run's start, from which the samples' ``seconds`` count.
    """

    engines: Sequence[InferenceEngine]
    every_s: float
    started: float
    samples: list[Sample] = field(default_factory=list)
    failures: list[Sample] = field(default_factory=list)
    _has_lived: set[int] = field(default_factory=set)

    async def watch(self) -> None:
        """One sample every ``every_s`` seconds."""
        machine = await asyncio.to_thread(Machine)
        due = time.monotonic() + self.every_s
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = time.monotonic() + self.every_s
            health, figures = await asyncio.gather(
                asyncio.gather(*(self._health(index) for index in range(len(self.engines)))),
                asyncio.to_thread(machine.sample),
            )
            self.samples.append({"seconds": self._seconds(), **figures, "engines": list(health)})

    async def _health(self, index: int) -> dict[str, float]:
        """Figures of an engine; none while it starts. Once it was ready, a silence is a failure."""
        try:
            found = await asyncio.wait_for(self.engines[index].health(), _PATIENCE_S)
        except Exception as error:
            if index in self._has_lived:
                text = f"{type(error).__name__}: {error}"
                self.failures.append({"seconds": self._seconds(), "engine": index, "error": text})
            return {}
        self._has_lived.add(index)
        return found

    def _seconds(self) -> float:
        return round(time.time() - self.started, 3)
