"""Ports that no program gets by chance between the moment they are chosen and their use."""

import random
import socket

_PORTS = range(21000, 32000)  # below those that the system itself gives to who asks for any


def free_port() -> int:
    """A port of loopback where nobody listens."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port")
