import os
import socket

import pytest

from tests.ports import free_port
from trinity.launcher.hardware import _gpu_devices, cpu_cores, is_port_free, local_gpus


@pytest.mark.parametrize("visible", ["", "-1", "-1,0"])
def test_hidden_gpus_are_none(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_gpus() == 0


def test_gpus_that_are_not_there_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "99")
    assert local_gpus() == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert local_gpus() == _gpu_devices()


def test_ports() -> None:
    port = free_port()
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()
        assert not is_port_free(port)
    assert is_port_free(port)


def test_a_port_taken_on_all_addresses_is_taken() -> None:
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen()
        assert not is_port_free(server.getsockname()[1])


def test_cores_are_those_of_this_process() -> None:
    allowed = os.sched_getaffinity(0)
    assert 1 <= cpu_cores() <= len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cpu_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
