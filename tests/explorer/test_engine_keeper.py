"""Engines that die are brought back with the newest weights, or end the work."""

import asyncio
import logging

import pytest

from trinity.common.models.protocol import WeightTicket
from trinity.explorer.engine_keeper import EngineKeeper
from trinity.utils.actor import ProcessDied, ProcessRestarted


class MortalEngine:
    """Dies when told; comes back as often as it has lives, without its weights."""

    def __init__(self, lives: int = 1) -> None:
        self.lives = lives
        self.calls: list[str] = []
        self._is_ready = True

    def die(self) -> None:
        self._is_ready = False
        self.lives -= 1

    async def health(self) -> dict[str, float]:
        self._require_life()
        if not self._is_ready:
            raise ProcessRestarted("gone")
        return {}

    async def prepare(self) -> None:
        self._require_life()
        self.calls.append("prepare")
        self._is_ready = self.lives > 0

    async def load_weights(self, ticket: WeightTicket) -> str:
        await self.health()
        self.calls.append(f"load {ticket.version}")
        return ticket.digest

    async def sleep(self) -> None:
        await self.health()
        self.calls.append("sleep")

    async def wake(self) -> None:
        await self.health()
        self.calls.append("wake")

    def _require_life(self) -> None:
        if self.lives < 0:
            raise ProcessDied("gone for good")


def ticket(version: int) -> WeightTicket:
    return WeightTicket(version, "memory", f"digest {version}", None)


def keeper(*engines: MortalEngine, auxiliary: tuple[MortalEngine, ...] = ()) -> EngineKeeper:
    return EngineKeeper(engines, auxiliary, logging.getLogger("test"), poll_s=0.01)


async def until(is_so) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.005)


async def test_an_engine_that_comes_back_with_other_weights_ends_the_work():
    class Forgetful(MortalEngine):
        async def load_weights(self, ticket: WeightTicket) -> str:
            found = await super().load_weights(ticket)
            return found if self.lives > 1 else "another"

    engine = Forgetful(2)
    keeper_ = keeper(engine)

    async def work() -> None:
        await keeper_.load(ticket(3))
        engine.die()
        await asyncio.sleep(60)

    told = "Engine 0 runs weights with digest another after its restart.*sent digest 3"
    with pytest.raises(RuntimeError, match=told):
        await keeper_.watching(work())


async def test_a_dead_engine_gets_the_newest_weights():
    engine, other, judge = MortalEngine(2), MortalEngine(), MortalEngine(2)
    keeper_ = keeper(engine, other, auxiliary=(judge,))

    async def work() -> None:
        for version in (1, 2):
            assert await keeper_.load(ticket(version)) == [f"digest {version}"] * 2
        engine.die()
        judge.die()
        await until(lambda: "prepare" in judge.calls and engine.calls[-2:] == ["prepare", "load 2"])

    await keeper_.watching(work())
    assert other.calls == ["load 1", "load 2"]
    assert judge.calls == ["prepare"]


async def test_a_death_in_a_sync_is_no_end():
    engine = MortalEngine(2)
    engine.die()
    assert await keeper(engine).load(ticket(3)) == ["digest 3"]
    assert engine.calls[:2] == ["prepare", "load 3"]


async def test_one_that_dies_in_a_sync_loads_once_each_time():
    """A trainer that sends its own weights has let go of them before a second load."""
    engine = MortalEngine(4)
    keeper_ = keeper(engine)
    for version in (1, 2):
        engine.die()
        assert await keeper_.load(ticket(version)) == [f"digest {version}"]
        assert await keeper_.load(ticket(version + 10)) == [f"digest {version + 10}"]
    assert engine.calls == ["prepare", "load 1", "load 11", "prepare", "load 2", "load 12"]


async def test_an_engine_without_lives_ends_the_work():
    engine = MortalEngine(0)

    async def work() -> None:
        engine.die()
        await asyncio.sleep(1000)

    with pytest.raises(ProcessDied, match="for good"):
        await keeper(engine).watching(work())


async def test_a_connection_that_a_living_engine_lost_is_an_error():
    """As to a trainer that is gone: to ask again and again would never end."""

    class Alone(MortalEngine):
        async def load_weights(self, ticket: WeightTicket) -> str:
            await super().load_weights(ticket)
            raise ConnectionRefusedError("the sender is gone")

    engine = Alone()
    with pytest.raises(ConnectionRefusedError, match="the sender is gone"):
        await asyncio.wait_for(keeper(engine).load(ticket(1)), 60)
    assert engine.calls == ["load 1"]


async def test_an_engine_that_did_not_answer_for_a_moment_is_asked_again():
    class Away(MortalEngine):
        async def load_weights(self, ticket: WeightTicket) -> str:
            digest = await super().load_weights(ticket)
            if self.calls == ["load 1"]:
                raise ProcessRestarted("unavailable")
            return digest

    engine = Away()
    assert await keeper(engine).load(ticket(1)) == ["digest 1"]
    assert engine.calls == ["load 1", "load 1"]


async def test_errors_and_results_of_the_work_pass():
    async def fails() -> None:
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        await keeper(MortalEngine()).watching(fails())


async def test_one_that_dies_before_it_rests_gets_no_weights_that_the_trainer_changes():
    engine = MortalEngine(2)
    keeper_ = keeper(engine)
    await keeper_.load(ticket(1))
    engine.die()
    await keeper_.rest()
    assert engine.calls == ["load 1", "prepare", "sleep", "sleep"]
    await keeper_.load(ticket(2))
    assert engine.calls[-1] == "load 2"


async def test_one_that_dies_while_it_rests_is_woken_with_the_weights_before():
    engine, other = MortalEngine(3), MortalEngine()
    keeper_ = keeper(engine, other)

    async def work() -> None:
        await keeper_.load(ticket(1))
        await keeper_.rest()
        engine.die()
        await until(lambda: engine.calls[-2:] == ["prepare", "sleep"])
        await keeper_.wake()
        assert engine.calls[-1] == "load 1"
        await keeper_.rest()
        await keeper_.wake()

    await keeper_.watching(work())
    assert engine.calls[-2:] == other.calls[-2:] == ["sleep", "wake"]


@pytest.mark.parametrize("newest", [5, None])
async def test_one_that_comes_back_after_its_weights_are_gone_gets_newer_ones(newest: int | None):
    """A channel of files keeps the last two versions; a trainer may be further by then."""

    class Files(MortalEngine):
        async def load_weights(self, ticket: WeightTicket) -> str:
            if ticket.version in gone:
                raise FileNotFoundError(f"weights_{ticket.version}")
            return await super().load_weights(ticket)

    async def board() -> tuple[int, WeightTicket | None]:
        return newest or 0, None if newest is None else ticket(newest)

    gone: set[int] = set()
    engine = Files(2)
    keeper_ = EngineKeeper([engine], (), logging.getLogger("test"), poll_s=0.01, newest=board)

    async def work() -> None:
        await keeper_.load(ticket(1))
        gone.add(1)
        engine.die()
        await until(lambda: engine.calls[-1] == "load 5")

    if newest is None:
        with pytest.raises(FileNotFoundError, match="weights_1"):
            await keeper_.watching(work())
    else:
        await keeper_.watching(work())
