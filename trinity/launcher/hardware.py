"""What this machine has, found without loading torch: GPUs and free ports."""

import os
import socket
from pathlib import Path


def local_gpus() -> int:
    """NVIDIA GPUs of this machine that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


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
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
