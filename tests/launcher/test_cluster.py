import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.ray_head import ray_head
from trinity.launcher import local_ray
from trinity.launcher.cluster import ClusterError, gpus_in_cluster, ray_cluster, running_cluster
from trinity.utils.actor import spawn


@pytest.fixture(autouse=True)
def _no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty place for Ray's sessions; its path must be short."""
    root = tempfile.mkdtemp(prefix="r", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", root)
    (Path(root) / "ray").mkdir()
    yield Path(root) / "ray"
    shutil.rmtree(root, ignore_errors=True)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


class Asked:
    """Tells what its process sees."""

    async def pid(self) -> int:
        return os.getpid()

    async def variable(self, name: str) -> str | None:
        return os.environ.get(name)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:1", "refused"),
        ("nowhere", "host:port"),
        ("no.such.host.invalid:6379", "No Ray cluster answers"),
    ],
)
def test_an_address_where_nothing_is_fails_before_ray_is_asked(
    address: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would try for a minute."""
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was asked"))
    with pytest.raises(ClusterError, match=reason) as caught, ray_cluster(address, "n", {}):
        pass
    assert "ray start --head" in str(caught.value)


def test_ray_address_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ClusterError, match=r"127\.0\.0\.1:1"), ray_cluster("auto", "n", {}):
        pass


def test_without_a_note_nothing_runs(ray_folder: Path) -> None:
    assert running_cluster() is None


def test_a_stale_note_is_not_followed(ray_folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        (ray_folder / "ray_current_cluster").write_text(f"127.0.0.1:{other.getsockname()[1]}")
        assert running_cluster() is None
        other.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody knocked
            other.accept()


def test_a_failed_start_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    before = children()
    wanted = pytest.raises(ClusterError, match=r"could not be started.*Not a directory")
    with wanted, ray_cluster("local", "n", {}):
        pass
    assert children() <= before
    assert "RAY_AUTH_TOKEN" not in os.environ


LATE = Exception("The current node timed out during startup. This could happen because ...")


@pytest.mark.parametrize(
    ("errors", "num_started"), [([LATE] * 2, 3), ([LATE] * 3, 3), ([OSError("no room")] * 3, 1)]
)
def test_a_node_that_is_late_is_started_again(
    errors: list[Exception], num_started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, started = list(errors), []

    def start(system_config: dict[str, object]) -> str:
        started.append(system_config)
        if left:
            raise left.pop()
        return "a node"

    monkeypatch.setattr(local_ray, "_lean_node", start)
    if len(errors) < num_started:
        assert local_ray._started({"a": 1}) == "a node"
    else:
        with pytest.raises(type(errors[0])):
            local_ray._started({"a": 1})
    assert started == [{"a": 1}] * num_started


@pytest.mark.ray
@pytest.mark.slow
async def test_a_local_cluster_ends_with_the_block(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"

    def is_call(event: dict[str, Any]) -> bool:
        return "asked.variable" in event["cat"]

    before = children()
    with ray_cluster("local", "n", {"TRINITY_X": "1"}, timeline) as is_local:
        assert is_local
        asked = spawn(Asked, name="asked", namespace="n", env_vars={"TRINITY_Y": "2"})
        assert await asked.variable("TRINITY_X") == "1"
        assert await asked.variable("TRINITY_Y") == "2"
        assert gpus_in_cluster() == 0
        names = {p.name() for p in psutil.Process().children(recursive=True)}
        assert not names & {"dashboard.py", "monitor.py", "log_monitor.py"}
        with ray_cluster(None, "n", {}) as is_local:
            assert not is_local
        assert ray.is_initialized()
        async with asyncio.timeout(60):
            while not any(is_call(event) for event in ray.timeline()):  # collected once a second
                await asyncio.sleep(0.1)
    assert not ray.is_initialized()
    assert children() <= before
    assert any(is_call(event) for event in json.loads(timeline.read_text()))


_DRIVER = """
import asyncio, os, signal, sys, time
from tests.launcher.test_cluster import Asked
from trinity.launcher.cluster import ray_cluster
from trinity.utils.actor import ProcessDied, spawn

async def lose_one():
    lost = spawn(Asked, name="lost", namespace="n")
    os.kill(await lost.pid(), signal.SIGKILL)
    try:
        await lost.pid()
    except ProcessDied:
        await asyncio.sleep(1)

with ray_cluster("local", "n", {}):
    kept = spawn(Asked, name="kept", namespace="n")
    asyncio.run(kept.pid())
    asyncio.run(lose_one())
    print("up", flush=True)
    time.sleep(float(sys.argv[1]))
"""


def _driver(seconds: float) -> subprocess.Popen[str]:
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "up\n"
    return driver


@pytest.mark.ray
@pytest.mark.slow
def test_nothing_outlives_a_driver_that_is_killed() -> None:
    driver = _driver(600)
    processes = psutil.Process(driver.pid).children(recursive=True)
    assert len(processes) >= 4
    driver.kill()
    driver.communicate()
    _, alive = psutil.wait_procs(processes, timeout=200)
    assert not alive


@pytest.mark.ray
@pytest.mark.slow
def test_deaths_and_the_end_are_silent() -> None:
    driver = _driver(0)
    out, err = driver.communicate(timeout=200)
    assert (driver.returncode, out, err) == (0, "", "")


@pytest.mark.ray
@pytest.mark.slow
def test_a_started_cluster_is_joined_and_left_running(ray_folder: Path) -> None:
    with ray_head() as started:
        address = running_cluster()
        assert address is not None and address.split(":")[1] == started.split(":")[1]
        for _ in range(2):
            with ray_cluster(None, "n", {}) as is_local:
                assert not is_local
        assert running_cluster() == address
    assert running_cluster() is None


@pytest.mark.ray
@pytest.mark.slow
def test_a_joined_cluster_is_told_of_services(ray_folder: Path) -> None:
    """Its processes have the environment of who started it, not of the run."""

    async def ask() -> list[str | None]:
        own = {"PART": "own"}  # a part's own variables come on top
        asked = spawn(Asked, name="asked", namespace="n", env_vars=own)
        return [await asked.variable(name) for name in ("PART", "RUN", "SERVICE")]

    with ray_head(), ray_cluster(None, "n", {"RUN": "run"}, joined_vars={"SERVICE": "its url"}):
        assert asyncio.run(ask()) == ["own", "run", "its url"]
