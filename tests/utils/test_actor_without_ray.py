"""Stand-ins after their cluster is gone. Ray's own functions would start another one."""

import asyncio
from typing import Any

import pytest
import ray

from trinity.utils.actor import _Remote, kill


class _Handle:
    """An actor that never answers."""

    @property
    def call(self) -> "_Handle":
        return self

    def options(self, **_: object) -> "_Handle":
        return self

    def remote(self, *_: object) -> Any:
        return asyncio.get_running_loop().create_future()


async def test_cancelling_a_call_starts_no_cluster() -> None:
    was_there = ray.is_initialized()
    stand_in = _Remote(_Handle(), "engine")
    call = asyncio.create_task(stand_in.prepare())
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    if not was_there:
        kill(stand_in)
    assert ray.is_initialized() == was_there
