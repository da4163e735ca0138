"""A Ray cluster on this machine for the time of one run, with no process it does not need.

`ray.init` would start an autoscaler, a dashboard server and a log forwarder beside it. A run asks
nothing of them; they cost 160 MB of memory and two seconds, so Ray's own node class is used
without them. Should a release of Ray move that class, `ray.init` starts the whole set.
"""

import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import ray

from trinity.launcher.ray_token import own_token

_START_ATTEMPTS = 3
_OBJECT_STORE_SHARE = 0.25
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_SHARE = 0.9  # Ray moves the store to disk if it asks for more
_MIN_OBJECT_STORE = 100 * 2**20
# What the node looks at ten times a second for the sake of other nodes and of many short tasks: a
# run has neither, and each look takes a core from a thread that computes.
_CALM = {
    "raylet_report_resources_period_milliseconds": 1000,
    "raylet_check_gc_period_milliseconds": 2000,
    "object_manager_timer_freq_ms": 1000,
    "kill_idle_workers_interval_ms": 2000,
}


def start_local_ray(options: Mapping[str, Any], has_timeline: bool = False) -> Callable[[], None]:
    """Start a cluster of this machine and join it; gives what leaves and ends it.

    Args:
        options: Of `ray.init`, but for the address.
        has_timeline: Record what every actor did when (`ray.timeline`), which costs memory.

    Raises:
        Exception: Whatever Ray raises if it can't start; nothing is left running.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if level := options.get("logging_level"):  # for what is said before `ray.init` sees to it
        logging.getLogger("ray").setLevel(level)
    with ExitStack() as undo:
        undo.enter_context(own_token())
        try:
            with _sessions_of_their_own():
                node = _started(_system_config(has_timeline))
        except (ImportError, AttributeError, TypeError):
            _start_whole_set(options, _system_config(has_timeline))
        else:
            undo.callback(
                node.kill_all_processes, check_alive=False, allow_graceful=True, wait=True
            )
            undo.enter_context(_reaper())
            ray.init(address=node.address, **options)
        undo.callback(ray.shutdown)
        return undo.pop_all().close


def _system_config(has_timeline: bool) -> dict[str, object]:
    config: dict[str, object] = {
        "prestart_worker_first_driver": False,
        "enable_metrics_collection": False,
        "worker_niceness": 0,  # engines and trainer are the job, not the background
        **_CALM,
    }
    return config if has_timeline else {**config, "task_events_report_interval_ms": 0}


def _start_whole_set(options: Mapping[str, Any], system_config: dict[str, object]) -> None:
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=_object_store_bytes(),
        _system_config=system_config,
        **options,
    )


def _started(system_config: dict[str, object]) -> Any:
    """A node that runs.

    Ray gives its Python agents 15 seconds to import, and its node dies if they are late, as on a
    machine that is at work: then another one is started.
    """
    for attempt in range(1, _START_ATTEMPTS + 1):
        try:
            return _lean_node(dict(system_config))  # Ray adds to it
        except Exception as error:  # a plain Exception, for want of a class of Ray's own
            if "timed out during startup" not in str(error) or attempt == _START_ATTEMPTS:
                raise
    raise AssertionError("unreachable")


def _lean_node(system_config: dict[str, object]) -> Any:
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class LeanNode(Node):
        """A head node without a dashboard server."""

        def __init__(self, parameters: RayParams) -> None:
            try:
                super().__init__(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True)
            except BaseException:
                if hasattr(self, "all_processes"):
                    self.kill_all_processes(check_alive=False, wait=True)
                raise

        def start_api_server(self, **_: object) -> None: ...

    parameters: dict[str, Any] = {
        "object_store_memory": _object_store_bytes(),
        "include_dashboard": False,
        "include_log_monitor": False,
        "no_monitor": True,
        "_system_config": system_config,
    }
    return LeanNode(RayParams(**parameters))


@contextmanager
def _sessions_of_their_own() -> Iterator[None]:
    """What Ray starts within is out of this process's group, as after `ray start`.

    A signal to the whole group (of `timeout`, of Slurm) is then for this process alone, which ends
    the others in turn: without its cluster it could only give up. The kernel still kills them with
    this process, however that ends.
    """
    services: Any = import_module("ray._private.services")
    plain = getattr(services, "ConsolePopen", None)
    if plain is None:  # another release of Ray
        yield
        return
    services.ConsolePopen = partial(plain, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = plain


@contextmanager
def _reaper() -> Iterator[None]:
    """If this process is killed, kill Ray's agents, which would look for their cluster for 60 s.

    The other processes of the cluster get a signal from the kernel.
    """
    raylets = [child for child in psutil.Process().children() if child.name() == "raylet"]
    agents = [str(agent.pid) for raylet in raylets for agent in raylet.children()]
    script = 'read -r _; kill -9 "$@"'  # read ends with the process that holds the pipe
    shell = subprocess.Popen(
        ["/bin/sh", "-c", script, "trinity-reaper", *agents],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        shell.kill()
        shell.communicate()


def _object_store_bytes() -> int:
    """A quarter of the free memory, as far as it fits into shared memory. Used pages only count."""
    wanted = int(psutil.virtual_memory().available * _OBJECT_STORE_SHARE)
    if _SHARED_MEMORY.is_dir():
        room = int(shutil.disk_usage(_SHARED_MEMORY).free * _SHARED_MEMORY_SHARE)
        if room >= _MIN_OBJECT_STORE:
            wanted = min(wanted, room)
    return max(wanted, _MIN_OBJECT_STORE)
