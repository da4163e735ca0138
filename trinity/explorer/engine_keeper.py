"""Engines that die are found, started again and given the weights that the others have."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TypeVar, cast

from trinity.common.deadlines import within
from trinity.common.models.protocol import InferenceEngine, SleepingEngine, WeightTicket
from trinity.utils import actor

T = TypeVar("T")
Newest = Callable[[], Awaitable[tuple[int, WeightTicket | None]]]

START_TIMEOUT_S = 900.0
"""Seconds that an engine or a trainer may take to load its model."""

_POLL_S = 1.0


class EngineKeeper:
    """Sees to it that engines live, as long as their processes may be started again.

    Requests to an engine that is not back yet fail as `ConnectionError`; who sends them tries
    again. ::

        alive --death--> process started anew --prepare, load_weights--> alive
                           no further restart --> the watch ends with the error

    One that dies while all `rest` comes back without weights, which the trainer is changing then,
    and rests: it gets the next ones, or those before at `wake`.

    Args:
        engines: Of the model that is trained: they get the newest weights.
        auxiliary: Of other models, whose weights never change.
        newest: Version and ticket of the newest weights that are out, as `Board.newest`.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        auxiliary: Sequence[InferenceEngine],
        logger: logging.Logger,
        poll_s: float = _POLL_S,
        newest: Newest | None = None,
    ) -> None:
        self._engines = list(engines)
        self._all = [*engines, *auxiliary]
        self._locks = [asyncio.Lock() for _ in self._all]
        self._logger = logger
        self._poll_s = poll_s
        self._newest = newest
        self._ticket: WeightTicket | None = None
        self._is_resting = False
        self._without_weights: set[int] = set()
        self._reloaded: dict[int, tuple[WeightTicket, str]] = {}  # in a restart, and what came
        self._tokens = [0.0] * len(self._all)
        self._num_lives = [1] * len(self._all)

    @property
    def num_tokens(self) -> int:
        """Tokens that the engines of the trained model had sampled a moment ago."""
        return int(sum(self._tokens[: len(self._engines)]))

    async def load(self, ticket: WeightTicket) -> list[str]:
        """Give every engine the weights of ``ticket``; the digest of what each then runs."""
        self._ticket, self._is_resting = ticket, False
        return await asyncio.gather(*map(self._load, range(len(self._engines))))

    async def rest(self) -> None:
        """Have the engines leave their GPUs to the trainer, until `load` or `wake`."""
        self._is_resting = True
        await asyncio.gather(*map(self._rest, range(len(self._engines))))

    async def wake(self) -> None:
        """End `rest` with the weights that were there before."""
        self._is_resting = False
        await asyncio.gather(*map(self._wake, range(len(self._engines))))

    async def watching(self, work: Coroutine[object, object, None]) -> None:
        """Do ``work`` while dead engines are brought back; the error if one can't be."""
        task = asyncio.create_task(work)
        watches = [asyncio.create_task(self._watch(place)) for place in range(len(self._all))]
        try:
            await asyncio.wait({task, *watches}, return_when=asyncio.FIRST_COMPLETED)
            for watch in watches:
                if watch.done():
                    watch.result()
            await task
        finally:
            for running in (task, *watches):
                running.cancel()
            await asyncio.gather(task, *watches, return_exceptions=True)

    async def _load(self, place: int) -> str:
        async def load(engine: InferenceEngine) -> str:
            assert self._ticket is not None, "load() has set it"
            ticket, digest = self._reloaded.pop(place, (None, ""))
            if ticket is not self._ticket:
                digest = await engine.load_weights(self._ticket)
            self._without_weights.discard(place)
            return digest

        return await self._asked(place, load)

    async def _rest(self, place: int) -> None:
        await self._asked(place, lambda engine: cast(SleepingEngine, engine).sleep())

    async def _wake(self, place: int) -> None:
        if place in self._without_weights and self._ticket is not None:
            await self._load(place)
        else:
            await self._asked(place, lambda engine: cast(SleepingEngine, engine).wake())

    async def _asked(self, place: int, ask: Callable[[InferenceEngine], Awaitable[T]]) -> T:
        """What an engine answers; one that dies over it is brought back and asked again.

        Raises:
            ConnectionError: It has no more lives; or it lives, and has lost somebody else.
        """
        while True:
            num_lives = self._num_lives[place]
            try:
                async with self._locks[place]:
                    return await ask(self._engines[place])
            except ConnectionError as error:
                await self._bring_back(place, error)
                is_own = getattr(error, "comes_back", False)
                if not is_own and self._num_lives[place] == num_lives:
                    raise

    async def _watch(self, place: int) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                health = await self._all[place].health()
            except ConnectionError as error:
                await self._bring_back(place, error)
            else:
                self._tokens[place] = health.get("tokens", 0.0)

    async def _bring_back(self, place: int, error: ConnectionError) -> None:
        """Make the engine ready again, whoever notices first; ``error`` if it has no more lives."""
        async with self._locks[place]:
            while not await self._is_alive(place):
                if not getattr(error, "comes_back", False):
                    raise error
                self._logger.warning("Engine %d died and is started again: %s", place, error)
                start = time.monotonic()
                try:
                    await self._make_ready(place)
                except ConnectionError as next_error:
                    error = next_error
                    continue
                seconds = time.monotonic() - start
                self._logger.warning("Engine %d is ready again after %.1f s.", place, seconds)

    async def _is_alive(self, place: int) -> bool:
        try:
            await self._all[place].health()
        except ConnectionError:
            return False
        return True

    async def _make_ready(self, place: int) -> None:
        engine = actor.repairing(self._all[place])
        hint = "Its log says how far it came."
        self._reloaded.pop(place, None)
        await within(START_TIMEOUT_S, engine.prepare(), f"engine {place}", "a restart", hint)
        if place < len(self._engines) and self._is_resting:
            self._without_weights.add(place)
            await cast(SleepingEngine, engine).sleep()
        elif place < len(self._engines) and self._ticket is not None:
            await self._load_again(place, engine, self._ticket)
        await actor.reopen(self._all[place])
        self._num_lives[place] += 1

    async def _load_again(self, place: int, engine: InferenceEngine, ticket: WeightTicket) -> None:
        """Give an engine the weights of the others; newer ones where those are gone."""
        try:
            digest = await engine.load_weights(ticket)
        except FileNotFoundError:
            newer = None if self._newest is None else (await self._newest())[1]
            if newer is None or newer.version <= ticket.version:
                raise
            await self._load_again(place, engine, newer)
            return
        if ticket.digest and digest != ticket.digest:
            raise RuntimeError(
                f"Engine {place} runs weights with digest {digest} after its restart, but the "
                f"trainer sent {ticket.digest}."
            )
        self._reloaded[place] = ticket, digest
