import socket

import pytest

from trinity.trainer.backends.torch.meeting import MeetingPlace
from trinity.trainer.backends.torch.sharding import RankSettings


def test_the_place_of_the_first_rank_is_its_own_from_the_moment_it_is_told():
    first, second = (MeetingPlace(RankSettings(rank, 2, timeout_s=60)) for rank in range(2))
    address = first.address()
    host, _, port = address.rpartition(":")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, int(port)))
    assert first.address() == address and second.address() == f"{host}:0"
    first.store(address).set("greeting", "hello")
    assert second.store(address).get("greeting") == b"hello"
