"""The Ray cluster of a run: joined if there is one, started on this machine if not."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from io import StringIO

import ray

from trinity.common.errors import TrinityError

_OBJECT_STORE_SHARE = 0.25
_REMEDY = (
    "Start it with `ray start --head`, correct cluster.ray_address or RAY_ADDRESS, or unset both: "
    "trinity then starts a local one."
)


class ClusterError(TrinityError):
    """The Ray cluster asked for can't be joined."""


@contextmanager
def ray_cluster(address: str | None, namespace: str, env_vars: Mapping[str, str]) -> Iterator[bool]:
    """A connection to Ray for the time of the block; yields whether the cluster was started here.

    Args:
        address: ``host:port`` to join; None or "auto": RAY_ADDRESS, else a running cluster of
            this machine, else a new local one that ends with the block.
        namespace: Where the actors of this run have their names.
        env_vars: Set in every process that Ray starts for the run.

    Raises:
        ClusterError: The named cluster does not answer; says how to start one.
    """
    asked = address if address not in (None, "", "auto") else os.environ.get("RAY_ADDRESS")
    options = {
        "namespace": namespace,
        "runtime_env": {"env_vars": dict(env_vars)},
        "logging_level": logging.ERROR,
        "log_to_driver": os.environ.get("RAY_DEDUP_LOGS") == "0",
    }
    is_local = _connect(asked, options)
    try:
        yield is_local
    finally:
        ray.shutdown()


def _connect(asked: str | None, options: dict[str, object]) -> bool:
    """Join or start; whether it was started here."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if asked and asked != "local":
        try:
            ray.init(address=asked, **options)  # type: ignore[arg-type]  # plain options
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ClusterError(
                f"No Ray cluster answers at {asked!r} ({error}). {_REMEDY}"
            ) from error
        return False
    if asked != "local":
        try:
            with redirect_stderr(StringIO()):
                ray.init(address="auto", **options)  # type: ignore[arg-type]  # plain options
            return False
        except ConnectionError:
            pass
    _start_local(options)
    return True


def _start_local(options: dict[str, object]) -> None:
    import psutil

    memory = psutil.virtual_memory().available
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=max(int(memory * _OBJECT_STORE_SHARE), 100 * 2**20),
        _system_config={"prestart_worker_first_driver": False},
        **options,  # type: ignore[arg-type]  # plain options
    )


def gpus_in_cluster() -> int:
    """GPUs of the cluster that is joined."""
    return int(ray.cluster_resources().get("GPU", 0))
