"""A session at the Tinker service: reached within a deadline, and named by every error."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar, cast

from trinity.common.errors import TrinityError
from trinity.common.extras import needed
from trinity.engine.tinker.settings import TinkerServiceSettings, key

if TYPE_CHECKING:
    from tinker import APIFuture, RestClient, SamplingClient, ServiceClient
    from tinker.types import ExternalWeightsUrlsResponse, GetServerCapabilitiesResponse

T = TypeVar("T")

_PROBE_S = 5.0  # for an answer to the question whether the service is well
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 8.0
_CLOSE_S, _CLOSE_LOST_S = 5.0, 0.5
_BETWEEN_CANCELS_S = 0.05


class TinkerServiceError(TrinityError):
    """The Tinker service refuses a request, fails it, or leaves it unanswered."""


class TinkerServiceLost(TinkerServiceError, ConnectionError):
    """The Tinker service as a whole is out of reach, silent or failing."""


def sdk() -> ModuleType:
    """The client library of the service.

    Raises:
        MissingExtraError: It is not installed.
    """
    return cast(ModuleType, needed("tinker", "tinker", "The Tinker service"))


class TinkerService:
    """One session. ``connect`` -> requests -> ``close``."""

    def __init__(self, settings: TinkerServiceSettings) -> None:
        self._settings = settings
        self._client: ServiceClient | None = None
        self._rest: RestClient | None = None
        self._beats: asyncio.Task[None] | None = None
        self._is_lost = False
        self.max_model_len: int | None = None
        """Longest sequence in tokens; None where the service does not tell."""

    @property
    def base_model(self) -> str:
        """What the service calls the model."""
        return self._settings.base_model

    @property
    def address(self) -> str:
        """Where the service is."""
        from tinker.lib.base_url import resolve_base_url

        return resolve_base_url(self._settings.base_url)

    async def connect(self) -> None:
        """Find the service, and the model there.

        Raises:
            MissingExtraError: The client library is not installed.
            TinkerServiceError: Nobody answers, the key is refused, or the model is not there.
        """
        tinker = sdk()
        await self._until_well()
        address = {"base_url": self._settings.base_url, "api_key": key()}
        self._client = tinker.ServiceClient(**address)
        rest: RestClient = await self._guarded(
            asyncio.to_thread(tinker.RestClient, **address), "the start"
        )
        self._rest = rest
        found: GetServerCapabilitiesResponse = await self.answer(
            rest.get_server_capabilities(), "the start"
        )
        lengths = {m.model_name: m.max_context_length for m in found.supported_models}
        if self.base_model not in lengths:
            raise TinkerServiceError(
                f"The Tinker service at {self.address} has no model {self.base_model!r}; it has "
                f"{', '.join(sorted(filter(None, lengths)))}. Set model.tinker.base_model."
            )
        self.max_model_len = lengths[self.base_model]

    async def create(self, make: Callable[["ServiceClient"], "APIFuture[T]"], phase: str) -> T:
        """A client for training or sampling, as ``make`` asks for it.

        In a thread: the first one opens the session, and the library waits for that.
        """
        if self._client is None:
            raise RuntimeError("The Tinker service is not connected: await prepare() first.")
        future = await self._guarded(asyncio.to_thread(make, self._client), phase)
        self._beats = getattr(self._client.holder, "_session_heartbeat_task", None)
        return await self.answer(future, phase)

    async def sampler(self, path: str | None = None) -> "SamplingClient":
        """What samples from the weights at ``path``, or from the model as it is (None)."""
        base = self.base_model if path is None else None
        return await self.create(
            lambda client: client.create_sampling_client(path, base), "the start of a sampler"
        )

    async def score(
        self, sampler: "SamplingClient", token_ids: Sequence[int], last: int
    ) -> list[float]:
        """Log-probability of each of the ``last`` tokens given those before it."""
        prompt = sdk().ModelInput.from_ints(list(token_ids))
        request = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=last)
        found: list[float | None] = await self.answer(request, "a scoring request")
        scored = [value for value in found[-last:] if value is not None]
        if len(scored) < last:
            raise TinkerServiceError(f"The Tinker service scored {len(scored)} of {last} tokens.")
        return scored

    async def download(self, path: str, folder: Path) -> None:
        """The files of exported weights, into ``folder``."""
        if self._rest is None:
            raise RuntimeError("The Tinker service is not connected: await prepare() first.")
        phase = "a download of weights"
        request = self._rest.get_external_weights_urls(path)
        found: ExternalWeightsUrlsResponse = await self.answer(request, phase)
        for name, url in sorted(found.urls.items()):
            target = folder / name
            if not target.resolve().is_relative_to(folder.resolve()):
                raise TinkerServiceError(f"The Tinker service names a file {name!r} to download.")
            target.parent.mkdir(parents=True, exist_ok=True)
            await self._guarded(_fetch(url, target, self._settings.timeout_s), phase)

    async def answer(self, future: "APIFuture[T]", phase: str) -> T:
        """What a request comes to.

        Raises:
            TinkerServiceError: An error, or nothing within the deadline.
        """
        return await self._guarded(future, phase)

    async def close(self) -> None:
        """End the session. A service that is gone is hardly waited for: it is for our end of it."""
        client, self._client = self._client, None
        if client is None:
            return
        limit = _CLOSE_LOST_S if self._is_lost else _CLOSE_S
        with contextlib.suppress(Exception):  # there the session ends by itself
            closed = client.close("errored" if self._is_lost else "success")
            await asyncio.wait_for(closed.result_async(), limit)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._end_beats(), _CLOSE_S)

    async def _end_beats(self) -> None:
        """Stop telling the service that the session lives.

        The library asks that of its own task once, and loses it if the task is just connecting;
        then it beats on, and the library waits for its end for ever.
        """
        beats = self._beats
        while beats is not None and not beats.done():
            beats.get_loop().call_soon_threadsafe(beats.cancel)
            await asyncio.sleep(_BETWEEN_CANCELS_S)

    async def _guarded(self, wait: Awaitable[T], phase: str) -> T:
        seconds = self._settings.timeout_s
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await wait
        except TinkerServiceError:
            raise
        except Exception as error:  # the boundary to the library, whose errors are of many kinds
            what = f"{type(error).__name__}: {error}"
            if limit.expired():
                what = f"it gave no answer in {seconds:.0f} s (model.tinker.timeout)"
            raise await self._error(f"{phase} failed: {what}") from error

    async def _error(self, what: str) -> TinkerServiceError:
        """An error that tells whether the service as a whole is well."""
        if trouble := await self._trouble():
            self._is_lost = True
            return TinkerServiceLost(f"The Tinker service at {self.address}: {what}; {trouble}.")
        return TinkerServiceError(f"The Tinker service at {self.address}: {what}.")

    async def _until_well(self) -> None:
        """Wait until the service answers at all, for a while."""
        seconds, wait = self._settings.start_timeout_s, _FIRST_WAIT_S
        deadline = asyncio.get_running_loop().time() + seconds
        while trouble := await self._trouble():
            if asyncio.get_running_loop().time() + wait > deadline:
                raise TinkerServiceLost(
                    f"The Tinker service at {self.address} was waited for {seconds:.0f} s, in "
                    f"vain: {trouble}. Is model.tinker.base_url (or TINKER_BASE_URL) its address?"
                )
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_S)

    async def _trouble(self) -> str | None:
        """What is wrong with the service as a whole; None if it is well."""
        import httpx  # comes with the library

        try:
            async with httpx.AsyncClient(timeout=_PROBE_S) as client:
                status = (await client.get(f"{self.address}/api/v1/healthz")).status_code
        except httpx.TimeoutException:
            return "it does not answer"
        except httpx.HTTPError as error:
            return f"it can't be reached ({error})"
        return f"it answers with status {status}" if status == 429 or status >= 500 else None


async def _fetch(url: str, target: Path, timeout_s: float) -> None:
    import httpx

    async with (
        httpx.AsyncClient(timeout=timeout_s, follow_redirects=True) as client,
        client.stream("GET", url) as answer,
    ):
        answer.raise_for_status()
        with target.open("wb") as file:
            async for chunk in answer.aiter_bytes():
                file.write(chunk)
