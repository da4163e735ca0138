"""Machines of a DLC job: here processes of one machine, each with a Ray node of its own."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import psutil
import pytest
import ray

from tests.ports import free_port
from trinity.common.errors import DeadlineError
from trinity.launcher import dlc
from trinity.launcher.cluster import ray_cluster
from trinity.launcher.dlc import DLCError, DLCJob, run_on_dlc

ENV = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456"}
LEND = """
import sys
from trinity.launcher.dlc import DLCJob, run_on_dlc
job = DLCJob(1, 2, "127.0.0.1", int(sys.argv[1]))
sys.exit(run_on_dlc(job, lambda: 9, print, timeout_s=400))
"""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A free port; Ray's folder is a short path of the test's own, and nothing stays behind."""
    place = tempfile.mkdtemp(prefix="r", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", place)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield free_port()
    shutil.rmtree(place, ignore_errors=True)


def nodes_at(port: int) -> list[psutil.Process]:
    """Ray's processes of the cluster at ``port``."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(f"127.0.0.1:{port}" in word for word in process.info["cmdline"] or ())
    ]


def test_the_place_of_a_machine_is_told_by_its_environment() -> None:
    job = DLCJob.from_env(ENV)
    assert (job.rank, job.size, job.address) == (1, 2, "10.0.0.1:23456")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "two"}, "'two'"),
        ({"RANK": "2"}, "RANK is 2; it lies from 0 to WORLD_SIZE - 1 = 1"),
    ],
)
def test_a_machine_of_no_job_is_told_what_is_wrong(change: dict[str, str], told: str) -> None:
    with pytest.raises(DLCError, match=told):
        DLCJob.from_env(ENV | change)


class Node:
    """Ray's processes of a machine, dead from the start with ``code``."""

    def __init__(self, code: int | None) -> None:
        self.returncode = code

    def poll(self) -> int | None:
        return self.returncode


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ray answers on its port, and takes the machine in at the third try."""
    tries: list[str] = []

    def init(address: str, **_: object) -> None:
        tries.append(address)
        if len(tries) < 3:
            raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}] * 2)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(dlc, "_LOOK_EVERY_S", 0.0)
    return tries


def test_a_machine_that_its_own_ray_is_late_to_take_in_is_waited_for(late: list[str]) -> None:
    said: list[str] = []
    job = DLCJob(0, 2, "10.0.0.1", 6379)
    dlc._wait_for_others(job, Node(None), said.append, 60)
    assert late == ["10.0.0.1:6379"] * 3
    assert said == ["2 machines are together at 10.0.0.1:6379."]


@pytest.mark.parametrize(
    ("code", "told"), [(None, "does not get ready: Failed to connect"), (1, "ended with code 1")]
)
def test_but_not_for_ever_nor_after_its_end(late: list[str], code: int | None, told: str) -> None:
    with pytest.raises(DLCError, match=told):
        dlc._wait_for_others(DLCJob(0, 2, "10.0.0.1", 6379), Node(code), print, -1)
    assert len(late) == 1


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_all_machines_are_one_cluster_and_end_with_the_run(port: int) -> None:
    other = subprocess.Popen([sys.executable, "-c", LEND, str(port)], stdout=subprocess.PIPE)
    said: list[str] = []

    def launch() -> int:
        assert os.environ["RAY_ADDRESS"] == f"127.0.0.1:{port}"
        with ray_cluster(None, "test", {}) as is_local:
            assert not is_local
            return 40 + sum(node["Alive"] for node in ray.nodes())

    try:
        assert run_on_dlc(DLCJob(0, 2, "127.0.0.1", port), launch, said.append, 400) == 42
        assert said == [f"2 machines are together at 127.0.0.1:{port}."]
        told, _ = other.communicate(timeout=200)
    finally:
        other.kill()
    assert (other.returncode, told.decode().strip()) == (
        0,
        f"Machine 1 of 2 works for the run at 127.0.0.1:{port}.",
    )
    assert "RAY_ADDRESS" not in os.environ
    assert not nodes_at(port)


@pytest.mark.ray
@pytest.mark.long
def test_a_machine_that_does_not_come_is_missed(port: int) -> None:
    with pytest.raises(DeadlineError, match=r"1 of 2 \(WORLD_SIZE\) came"):
        run_on_dlc(DLCJob(0, 2, "127.0.0.1", port), lambda: 0, lambda _: None, timeout_s=20)
    assert not nodes_at(port)


def test_a_head_that_does_not_come_is_missed(port: int) -> None:
    with pytest.raises(DeadlineError, match=f"Waited 2 s for Ray at 127.0.0.1:{port}"):
        run_on_dlc(DLCJob(1, 2, "127.0.0.1", port), lambda: 0, lambda _: None, timeout_s=2)


@pytest.mark.ray
@pytest.mark.long
def test_a_port_that_is_taken_is_told(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        with pytest.raises(DLCError, match="can't be started on machine 0 of 2"):
            run_on_dlc(DLCJob(0, 2, "127.0.0.1", port), lambda: 0, lambda _: None, timeout_s=60)
