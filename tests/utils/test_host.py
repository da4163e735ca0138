"""The address that is told to other machines."""

import socket

import pytest

from trinity.utils.host import own_host


@pytest.fixture(scope="module")
def routed():
    """What this machine sends from, if it has a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 1))
        except OSError:
            pytest.skip("this machine has no network")
        return probe.getsockname()[0]


@pytest.mark.parametrize("name", [None, "localhost", "127.0.1.1", "no-such-machine.invalid"])
def test_a_name_of_loopback_or_of_nobody_is_not_what_others_are_told(name, routed):
    assert own_host("127.0.1.1") == routed
    assert not own_host(name).startswith("127.")


def test_an_address_of_the_network_is_taken_as_it_is():
    assert own_host("192.0.2.77") == "192.0.2.77"


def test_one_can_listen_there():
    with socket.socket() as listener:
        listener.bind((own_host(), 0))
