"""Hold a worker in mid-request: what a test asks of it then comes in time on any machine."""

import asyncio
import threading

from trinity.engine.torch import TorchEngine

LIMIT_S = 60  # far more than anything here takes, unless it never ends


class Standstill:
    """The worker makes ``num_steps`` more steps, and none then until `end`."""

    def __init__(self, engine: TorchEngine, num_steps: int = 5) -> None:
        self._worker = engine._worker
        self._last = self._steps() + num_steps
        self._is_there, self._may_go = threading.Event(), threading.Event()
        self._worker._put(self._look)

    async def begun(self) -> None:
        """Once the worker stands still."""
        assert await asyncio.to_thread(self._is_there.wait, LIMIT_S)

    async def asked(self) -> None:
        """Once something is asked of the worker: it does that first, after the end."""
        async with asyncio.timeout(LIMIT_S):
            while not self._worker._inbox:
                await asyncio.sleep(0.001)

    def end(self) -> None:
        self._may_go.set()

    def _steps(self) -> int:
        return sum(batcher.num_steps for batcher in self._worker.batchers)

    def _look(self) -> None:
        if self._steps() < self._last:
            self._worker._put(self._look)
            return
        self._is_there.set()
        assert self._may_go.wait(LIMIT_S)
