"""`trinity run --dlc`: the machines of a DLC job (Aliyun PAI) become one Ray cluster for the run.

DLC runs the same command on every machine and says by environment variables which one it is, as
for any PyTorch job. The machine of rank 0 starts the cluster, waits for the others and runs the
file; the others lend themselves to it and end when it ends.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from trinity.common.errors import DeadlineError, TrinityError
from trinity.launcher.ray_token import known_token

_GATHER_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 1.0
_MISSED_LOOKS = 5  # a busy head may let one pass
_STOP_TIMEOUT_S = 30.0
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class DLCError(TrinityError):
    """This is no machine of a DLC job, or Ray can't be started on it."""


@dataclass(frozen=True)
class DLCJob:
    """One machine's place in the job.

    Args:
        rank: Number of this machine, from 0.
        size: Machines of the job.
        host: Address of the machine of rank 0.
        port: TCP port there that the job may use; the cluster's.
    """

    rank: int
    size: int
    host: str
    port: int

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> DLCJob:
        """The place that the variables of a PyTorch job tell.

        Raises:
            DLCError: One is missing, or no number where it must be one.
        """
        for name in _VARIABLES:
            if not env.get(name):
                raise DLCError(
                    f"--dlc reads {', '.join(_VARIABLES)}, and {name} is not set. Start the "
                    "command as a PyTorch job of DLC, set them yourself, or leave --dlc out."
                )
        try:
            rank, size, port = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        except ValueError as error:
            raise DLCError(
                f"--dlc: RANK, WORLD_SIZE and MASTER_PORT are numbers: {error}"
            ) from None
        if not 0 <= rank < size:
            raise DLCError(f"--dlc: RANK is {rank}; it lies from 0 to WORLD_SIZE - 1 = {size - 1}.")
        return cls(rank, size, env["MASTER_ADDR"], port)

    @property
    def address(self) -> str:
        """Where the cluster is joined."""
        return f"{self.host}:{self.port}"


def run_on_dlc(
    job: DLCJob,
    launch: Callable[[], int],
    say: Callable[[str], None],
    timeout_s: float = _GATHER_TIMEOUT_S,
) -> int:
    """Run ``launch`` on the machine of rank 0 with all others; the exit code of this machine.

    ``launch`` finds the cluster by RAY_ADDRESS.

    Raises:
        DLCError: Ray can't be started here.
        DeadlineError: After ``timeout_s`` machines are missing.
    """
    with known_token():
        if job.rank:
            return _lend(job, say, timeout_s)
        with _ray(job, "--head", f"--port={job.port}", f"--node-ip-address={job.host}") as node:
            _wait_for_head(job, node, timeout_s)
            _wait_for_others(job, node, say, timeout_s)
            with _address_known(job):
                return launch()


def _lend(job: DLCJob, say: Callable[[str], None], timeout_s: float) -> int:
    """Give this machine to the cluster until that ends."""
    _wait_for_head(job, None, timeout_s)
    with _ray(job, f"--address={job.address}") as node:
        say(f"Machine {job.rank} of {job.size} works for the run at {job.address}.")
        missed = 0
        while missed < _MISSED_LOOKS and node.poll() is None:
            time.sleep(_LOOK_EVERY_S)
            missed = 0 if _answers(job) else missed + 1
    if missed < _MISSED_LOOKS:
        raise DLCError(f"Ray on machine {job.rank} ended before the run at {job.address} did.")
    return 0


@contextmanager
def _ray(job: DLCJob, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Ray's processes of this machine; they end with the block.

    Raises:
        DLCError: They ended at once; with what Ray said.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    command += ["--disable-usage-stats", *options]
    with tempfile.TemporaryFile() as output:
        # A session of its own: Ctrl-C is for the run, which needs Ray to end in order.
        node = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            yield node
        except (DLCError, DeadlineError):
            if node.poll() is None:
                raise
            raise DLCError(
                f"Ray can't be started on machine {job.rank} of {job.size}: {_tail(output)}"
            ) from None
        finally:
            _stop(node)


def _stop(node: subprocess.Popen[bytes]) -> None:
    node.terminate()
    with suppress(subprocess.TimeoutExpired):
        node.wait(_STOP_TIMEOUT_S)
    if node.poll() is None:
        node.kill()
        node.wait()


def _tail(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").split("\n")
    return "\n".join(line for line in lines if line.strip())[-1000:]


def _wait_for_head(job: DLCJob, node: subprocess.Popen[bytes] | None, timeout_s: float) -> None:
    """Wait until the cluster answers; ``node`` are its processes if they run here."""
    deadline = time.monotonic() + timeout_s
    while not _answers(job):
        if node is not None:
            _require_life(node)
        if time.monotonic() > deadline:
            hint = "Look whether the command on the machine of rank 0 failed."
            raise DeadlineError(f"Ray at {job.address}", "the start of --dlc", timeout_s, hint)
        time.sleep(_LOOK_EVERY_S)


def _wait_for_others(
    job: DLCJob, node: subprocess.Popen[bytes], say: Callable[[str], None], timeout_s: float
) -> None:
    import ray

    deadline = time.monotonic() + timeout_s
    _connect(job, node, deadline)
    try:
        while (found := sum(node["Alive"] for node in ray.nodes())) < job.size:
            if time.monotonic() > deadline:
                hint = (
                    f"{found} of {job.size} (WORLD_SIZE) came. Look whether their command failed."
                )
                raise DeadlineError("the other machines", "the start of --dlc", timeout_s, hint)
            time.sleep(_LOOK_EVERY_S)
        say(f"{found} machines are together at {job.address}.")
    finally:
        ray.shutdown()


def _connect(job: DLCJob, node: subprocess.Popen[bytes], deadline: float) -> None:
    """Join the cluster of this machine.

    Its port answers before this machine is one of its nodes. Ray waits a minute for that, in which
    a busy machine may not get so far.
    """
    import ray

    while True:
        try:
            ray.init(address=job.address, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError) as error:
            _require_life(node)
            if time.monotonic() > deadline:
                raise DLCError(f"Ray on this machine does not get ready: {error}") from error
            time.sleep(_LOOK_EVERY_S)
        else:
            return


def _require_life(node: subprocess.Popen[bytes]) -> None:
    if node.poll() is not None:
        raise DLCError(f"Ray ended with code {node.returncode}.")


def _answers(job: DLCJob) -> bool:
    try:
        socket.create_connection((job.host, job.port), timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def _address_known(job: DLCJob) -> Iterator[None]:
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = job.address
    try:
        yield
    finally:
        if before is None:
            del os.environ["RAY_ADDRESS"]
        else:
            os.environ["RAY_ADDRESS"] = before
