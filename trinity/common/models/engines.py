"""`EngineGroup`: the engines of one model, seen as one."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar, cast

from trinity.common.models.protocol import AdapterEngine, InferenceEngine, NamedAdapter

T = TypeVar("T")

_RESTART_WAIT_S = 300.0
_RESTART_POLL_S = 0.25


class EngineGroup:
    """Engines that serve the same weights. A request goes to the least loaded one.

    Args:
        engines: One or more; of those that are equally busy the first is asked.
    """

    def __init__(self, engines: InferenceEngine | Sequence[InferenceEngine]) -> None:
        self.engines = list(engines) if isinstance(engines, Sequence) else [engines]
        self._load = [0] * len(self.engines)
        self.num_requests = [0] * len(self.engines)
        """Requests of this process so far, by engine."""

    @property
    def load(self) -> int:
        """Requests of this process that are under way."""
        return sum(self._load)

    async def ask(self, request: Callable[[InferenceEngine], Awaitable[T]]) -> T:
        """What ``request`` gives on an engine; one that is started again is waited for."""
        deadline = time.monotonic() + _RESTART_WAIT_S
        while True:
            try:
                return await self._ask_living(request)
            except ConnectionError as error:
                if not getattr(error, "comes_back", False) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_RESTART_POLL_S)

    async def version(self) -> int:
        """The oldest version of weights that samples now."""
        return min(await asyncio.gather(*[engine.version() for engine in self.engines]))

    async def health(self) -> dict[str, float]:
        """Figures of all engines: sums, but the least version."""
        healths = await asyncio.gather(*[engine.health() for engine in self.engines])
        names = {name for health in healths for name in health}
        total = {name: sum(health.get(name, 0.0) for health in healths) for name in sorted(names)}
        if "version" in total:
            total["version"] = min(health["version"] for health in healths if "version" in health)
        return total

    # Adapters

    async def adapters(self) -> list[NamedAdapter]:
        """Those that every engine has; one that is out of reach is passed over, if not all are."""
        asked = [engine.adapters() for engine in self._of_adapters]
        outcome = await asyncio.gather(*asked, return_exceptions=True)
        failed = [error for error in outcome if isinstance(error, BaseException)]
        for error in failed:
            if len(failed) == len(outcome) or not isinstance(error, ConnectionError):
                raise error
        first, *others = [found for found in outcome if not isinstance(found, BaseException)]
        names = [{adapter.name for adapter in found} for found in others]
        return [adapter for adapter in first if all(adapter.name in found for found in names)]

    async def load_adapter(self, adapter: NamedAdapter) -> None:
        """Have all engines load ``adapter``; if one can't, none has it."""
        jobs = [engine.load_adapter(adapter) for engine in self._of_adapters]
        outcome = await asyncio.gather(*jobs, return_exceptions=True)
        failed = [error for error in outcome if isinstance(error, BaseException)]
        if not failed:
            return
        for engine, error in zip(self._of_adapters, outcome, strict=True):
            if error is None:
                await engine.unload_adapter(adapter.name)
        raise failed[0]

    async def unload_adapter(self, name: str) -> None:
        """Have all engines unload an adapter; `LookupError` if none has it."""
        jobs = [engine.unload_adapter(name) for engine in self._of_adapters]
        outcome = await asyncio.gather(*jobs, return_exceptions=True)
        failed = [error for error in outcome if isinstance(error, BaseException)]
        lacking = [error for error in failed if isinstance(error, LookupError)]
        for error in failed:
            if error not in lacking or len(lacking) == len(outcome):
                raise error

    # Inside

    @property
    def _of_adapters(self) -> list[AdapterEngine]:
        return cast(list[AdapterEngine], self.engines)

    async def _ask_living(self, request: Callable[[InferenceEngine], Awaitable[T]]) -> T:
        """What ``request`` gives on the least loaded engine, or on the next one that lives."""
        order = sorted(range(len(self.engines)), key=lambda place: self._load[place])
        for attempt, place in enumerate(order, start=1):
            self._load[place] += 1
            self.num_requests[place] += 1
            try:
                return await request(self.engines[place])
            except ConnectionError:
                if attempt == len(order):
                    raise
            finally:
                self._load[place] -= 1
        raise ValueError("This model has no engines.")
