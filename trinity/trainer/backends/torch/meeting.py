"""Where the ranks of a trainer meet: a store that the first of them serves."""

from datetime import timedelta

import torch.distributed as dist

from trinity.trainer.backends.torch.sharding import RankSettings
from trinity.utils.host import own_host


class MeetingPlace:
    """One rank's way to the others.

    The first rank listens from the moment it is asked for its address, until all are there: others
    may take seconds to start, in which a port that nobody holds could become another program's.
    """

    def __init__(self, settings: RankSettings) -> None:
        self._rank = settings.rank
        self._timeout = timedelta(seconds=settings.timeout_s)
        self._served: dist.TCPStore | None = None

    def address(self) -> str:
        """This host, and the port of the first rank's store; the other ranks have none."""
        host = own_host()
        if self._rank != 0:
            return f"{host}:0"
        if self._served is None:
            self._served = dist.TCPStore(
                host, 0, is_master=True, timeout=self._timeout, wait_for_workers=False
            )
        return f"{host}:{self._served.port}"

    def store(self, address: str) -> dist.Store:
        """The store of the rank that is at ``address``."""
        if self._served is not None:
            return self._served
        host, _, port = address.rpartition(":")
        return dist.TCPStore(host, int(port), is_master=False, timeout=self._timeout)
