"""What is here, found without loading torch or Ray: GPUs, free ports, the cluster asked for."""

import os
import socket
from itertools import takewhile
from pathlib import Path

OWN_CLUSTER = "local"
"""In place of an address: a cluster of the run's own."""


def asked_cluster(address: str | None) -> str | None:
    """The address that `cluster.ray_address` or else RAY_ADDRESS names; None if none does."""
    given = (address, os.environ.get("RAY_ADDRESS"))
    return next((name for name in given if name and name != "auto"), None)


def local_gpus() -> int:
    """NVIDIA GPUs of this machine that this process may use."""
    present = _gpu_devices()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = takewhile(lambda part: part not in ("", "-1"), map(str.strip, visible.split(",")))
    return sum(int(name) < present if name.isdigit() else present > 0 for name in named)


def _gpu_devices() -> int:
    """GPUs the driver shows; in a container the device files tell which of them are given to it."""
    nodes = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*")]
    count = sum(name.isdigit() for name in nodes)
    return count or len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def is_port_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def cpu_cores() -> int:
    """Cores this process may use: its affinity, and the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores
