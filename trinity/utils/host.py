"""The address under which other machines reach this one."""

import socket


def own_host(name: str | None = None) -> str:
    """An IPv4 address of this machine that others reach; a loopback one if it has no network.

    Args:
        name: Of this machine, looked up first; None: its host name. Debian's own installations
            give that name a loopback address (127.0.1.1), which tells other machines nothing.
    """
    named = _named(name or socket.gethostname())
    return _routed(named) if named.startswith("127.") else named


def _named(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:  # no name server knows it
        return "127.0.0.1"


def _routed(otherwise: str) -> str:
    """What this machine would send from to an address that is not its own."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing
        except OSError:  # no way out
            return otherwise
        return str(probe.getsockname()[0])
