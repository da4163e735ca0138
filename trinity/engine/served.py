"""`ServedEngine`: any engine with OpenAI's API beside it, in the same process."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from trinity.common.models.api import ApiServer, OneModel
from trinity.common.models.protocol import (
    AdapterEngine,
    Completion,
    InferenceEngine,
    NamedAdapter,
    SamplingParams,
    SleepingEngine,
    VisionEngine,
    WeightTicket,
)
from trinity.common.models.settings import ModelSettings
from trinity.common.models.wrapper import ModelWrapper


class ServedEngine:
    """An engine that programs outside of trinity can ask too.

    Args:
        make: Makes the engine; called in the process this object lives in.
        settings: Of the model, as the API shows it.
        host, port, api_key: Of the API; see `ApiServer`.
    """

    def __init__(
        self,
        make: Callable[[], InferenceEngine],
        settings: ModelSettings,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
    ) -> None:
        self._engine = make()
        self._at_home = _AtHome(self._engine)
        settings = replace(settings, enable_history=False)  # nobody would take it
        self._model = OneModel(ModelWrapper(cast(InferenceEngine, self._at_home), settings))
        self._server = ApiServer(host, port, api_key)
        self._is_serving = False

    async def prepare(self) -> None:
        """Get the engine ready, then answer requests; `OSError` if the port is taken.

        Once more where the engine is to start again.
        """
        self._at_home.loop = asyncio.get_running_loop()
        await self._engine.prepare()
        if not self._is_serving:
            self._server.start(self._model)
            self._is_serving = True

    async def api(self) -> tuple[str, str]:
        """Address (without ``/v1``) and key of the API."""
        return self._server.address, self._server.api_key

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str | None = None
    ) -> list[Completion]:
        return await self._engine.sample(prompt_ids, params, adapter)

    async def sample_with_images(
        self, prompt_ids: Sequence[int], images: Tensor, params: SamplingParams
    ) -> list[Completion]:
        engine = cast(VisionEngine, self._engine)
        return await engine.sample_with_images(prompt_ids, images, params)

    async def partial(self, request_id: str) -> list[list[int]]:
        return await self._engine.partial(request_id)

    async def logprobs(
        self, token_ids: Sequence[int], temperature: float = 1.0, adapter: str | None = None
    ) -> list[float]:
        return await self._engine.logprobs(token_ids, temperature, adapter)

    async def load_weights(self, ticket: WeightTicket) -> str:
        return await self._engine.load_weights(ticket)

    async def adapters(self) -> list[NamedAdapter]:
        return await cast(AdapterEngine, self._engine).adapters()

    async def load_adapter(self, adapter: NamedAdapter) -> None:
        await cast(AdapterEngine, self._engine).load_adapter(adapter)

    async def unload_adapter(self, name: str) -> None:
        await cast(AdapterEngine, self._engine).unload_adapter(name)

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def sleep(self) -> None:
        await cast(SleepingEngine, self._engine).sleep()

    async def wake(self) -> None:
        await cast(SleepingEngine, self._engine).wake()

    async def version(self) -> int:
        return await self._engine.version()

    async def health(self) -> dict[str, float]:
        return await self._engine.health()

    async def close(self) -> None:
        """End the API, then the engine."""
        await asyncio.to_thread(self._server.stop)  # requests under way may need this loop
        await self._engine.close()


class _AtHome:
    """An engine for callers of any thread: what they call runs in the engine's own event loop.

    The API's thread has a loop of its own, and what waits in one loop is not woken from another.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self._engine, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            job = asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self.loop)
            return await asyncio.wrap_future(job)

        return call
