"""The Ray cluster of a run: joined if there is one, started on this machine if not."""

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import ray

from trinity.common.errors import TrinityError
from trinity.launcher.hardware import OWN_CLUSTER, asked_cluster
from trinity.launcher.local_ray import start_local_ray
from trinity.launcher.ray_token import known_token

_PROBE_TIMEOUT_S = 5.0
_REMEDY = (
    "Start it with `ray start --head`, correct cluster.ray_address or RAY_ADDRESS, or unset both: "
    "trinity then starts a local one."
)


class ClusterError(TrinityError):
    """The Ray cluster asked for can't be joined, or none can be started."""


@contextmanager
def ray_cluster(
    address: str | None,
    namespace: str,
    env_vars: Mapping[str, str],
    timeline: Path | None = None,
    joined_vars: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[bool]:
    """A connection to Ray for the time of the block; yields whether the cluster was started here.

    A connection that the embedding program has already is used, and left alone.

    Args:
        address: ``host:port`` to join; "local" for a new one; None or "auto": RAY_ADDRESS, else the
            cluster that ``ray start`` left running on this machine, else a new local one that ends
            with the block.
        namespace: Where the actors of this run have their names.
        env_vars: Set in every process that Ray starts for the run.
        timeline: File for a Chrome trace of what the actors did; None records nothing.
        joined_vars: Further variables, for a cluster that was started elsewhere.

    Raises:
        ClusterError: The cluster does not answer, or can't be started; says what to do.
    """
    if ray.is_initialized():
        yield False
        return
    target = asked_cluster(address) or running_cluster()
    options = {
        "namespace": namespace,
        "runtime_env": {"env_vars": dict(env_vars)},
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    is_local = target in (None, OWN_CLUSTER)
    if is_local:
        leave = _start(options, has_timeline=timeline is not None)
    else:
        variables = {**env_vars, **joined_vars}
        leave = _join(str(target), {**options, "runtime_env": {"env_vars": variables}})
    _mute()
    try:
        yield is_local
        if timeline is not None:
            timeline.parent.mkdir(parents=True, exist_ok=True)
            ray.timeline(str(timeline))
    finally:
        leave()


def _start(options: Mapping[str, Any], has_timeline: bool) -> Callable[[], None]:
    try:
        return start_local_ray(options, has_timeline)
    except Exception as error:  # Ray raises all kinds
        raise ClusterError(
            f"A local Ray cluster could not be started: {error!r}. Ray keeps its logs and sockets "
            f"below {_ray_folder()}: look into session_latest/logs there, or set RAY_TMPDIR to a "
            "short path with free space if the folder is the trouble."
        ) from error


def _join(address: str, options: Mapping[str, Any]) -> Callable[[], None]:
    with ExitStack() as undo:
        undo.enter_context(known_token())
        try:
            _probe(address)
            ray.init(address=address, **options)
        except (OSError, ValueError, RuntimeError) as error:
            raise ClusterError(
                f"No Ray cluster answers at {address!r} ({error}). {_REMEDY}"
            ) from error
        undo.callback(ray.shutdown)
        return undo.pop_all().close


def _mute() -> None:
    """End Ray's thread that prints to stdout when a process dies: who waits for it is told."""
    worker: Any = import_module("ray._private.worker").global_worker
    with suppress(AttributeError):  # another release of Ray: it prints
        worker.threads_stopped.set()
        worker.gcs_error_subscriber.close()


def _probe(address: str) -> None:
    """Fail at once if nothing listens: Ray itself would try for a minute."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("the address must be host:port")
    socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S).close()


def running_cluster() -> str | None:
    """Address of the cluster that ``ray start`` left running on this machine, or None.

    Ray's note of it may be older than the cluster's end, or another user's: only an address that a
    raylet of this user serves counts. Clusters that other programs started for themselves don't.
    """
    try:
        address = (_ray_folder() / "ray_current_cluster").read_text().strip()
    except OSError:
        return None
    wanted = f"--gcs-address={address}"
    for process in psutil.process_iter(["name", "uids"]):
        uids = process.info["uids"]
        if process.info["name"] == "raylet" and uids and uids.real == os.getuid():
            try:
                if wanted in process.cmdline():
                    return address
            except psutil.Error:
                continue
    return None


def _ray_folder() -> Path:
    """Where Ray keeps its sessions."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"


def gpus_in_cluster() -> int:
    """GPUs of the cluster that is joined."""
    return int(ray.cluster_resources().get("GPU", 0))
