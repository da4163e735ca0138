import asyncio
import os
import signal
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import cast

import numpy as np
import psutil
import pytest

from tests.dying import end_of
from trinity.launcher.cluster import ray_cluster
from trinity.utils import actor
from trinity.utils.actor import ProcessDied, spawn

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NAMESPACE = "test_actor"
LIMIT_S = 60  # far more than anything here takes, unless it never ends


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with ray_cluster("local", NAMESPACE, {}):
        yield


@pytest.fixture
async def part(request: pytest.FixtureRequest) -> AsyncIterator["Part"]:
    part = spawn(Part, name=request.node.name, namespace=NAMESPACE)
    yield part
    actor.kill(part)


class TwoArguments(Exception):
    """Pickles, but does not unpickle."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


class Holding(Exception):
    """Does not pickle."""

    def __init__(self) -> None:
        super().__init__("I hold a socket")
        self.socket = socket.socket()


class Part:
    """A plain class of the kind that becomes an actor."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.seen: list[str] = []

    async def add(self, number: int = 1) -> int:
        self.count += number
        return self.count

    async def pid(self) -> int:
        return os.getpid()

    async def events(self) -> list[str]:
        return self.seen

    async def fail(self, error: BaseException | type[BaseException]) -> None:
        raise error

    async def fail_holding(self) -> None:
        raise Holding

    async def fail_two(self) -> None:
        raise TwoArguments(1, 2)

    async def leave(self) -> None:
        sys.exit(3)

    async def sleep(self) -> None:
        self.seen.append("asleep")
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise

    async def ask(self, other: "Part", number: int) -> int:
        return await other.add(number)

    async def total(self, reference: object) -> tuple[float, bool, bool]:
        array, again = actor.fetch(reference), actor.fetch(reference)
        assert isinstance(array, np.ndarray) and isinstance(again, np.ndarray)
        return float(array.sum()), array.flags.writeable, np.shares_memory(array, again)

    async def put_here(self) -> object:
        return actor.put(np.ones(10))


class Stillborn:
    """Fails when it is built."""

    def __init__(self) -> None:
        raise ValueError("no model there")

    async def add(self) -> None: ...


async def test_calls_run_elsewhere(part: Part) -> None:
    assert await part.pid() != os.getpid()
    assert await part.add(2) == 2
    assert await part.add(number=3) == 5


async def test_a_name_is_joined_not_started_twice(part: Part, request) -> None:
    await part.add(7)
    again = spawn(Part, 100, name=request.node.name, namespace=NAMESPACE)
    assert await again.add() == 8
    connected = actor.connect(request.node.name, NAMESPACE)
    assert await cast(Part, connected).add() == 9


async def test_nobody_answers_to_an_unknown_name() -> None:
    assert actor.connect("nobody", NAMESPACE) is None


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        TimeoutError("late"),
        StopAsyncIteration("end"),
        KeyError("k"),
        OSError(2, "x"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_come_out_as_themselves(part: Part, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        await part.fail(error)
    assert caught.value.args == error.args
    assert "in fail" in "".join(traceback.format_exception(caught.value))


async def test_errors_that_cannot_travel_keep_their_text(part: Part) -> None:
    with pytest.raises(RuntimeError, match="TwoArguments: 1 and 2"):
        await part.fail_two()
    with pytest.raises(RuntimeError, match="Holding: I hold a socket"):
        await part.fail_holding()


async def test_an_exit_over_there_is_an_error_here(part: Part) -> None:
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        await part.leave()
    with pytest.raises(RuntimeError, match="CancelledError"):
        await part.fail(asyncio.CancelledError)
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        await part.fail(KeyboardInterrupt)
    assert await part.add() == 1


async def test_a_missing_method_is_an_attribute_error(part: Part) -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        await part.nothing()  # type: ignore[attr-defined]


async def test_an_error_of_the_constructor_comes_with_the_first_call() -> None:
    stillborn = spawn(Stillborn, name="stillborn", namespace=NAMESPACE)
    with pytest.raises(ValueError, match="no model there"):
        await stillborn.add()
    with pytest.raises(ProcessDied):
        async with asyncio.timeout(LIMIT_S):
            while True:
                with pytest.raises(ValueError):
                    await stillborn.add()
                await asyncio.sleep(0.1)


async def test_a_killed_process_is_noticed_by_all_calls(part: Part) -> None:
    pid = await part.pid()
    waiting = asyncio.create_task(part.sleep())
    while not await part.events():
        await asyncio.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ProcessDied, match=r"killed_process.*was killed or crashed"):
        await asyncio.wait_for(waiting, LIMIT_S)  # the call itself would take longer
    await end_of(part.add)


async def test_of_several_processes_the_dead_one_is_told(part: Part) -> None:
    others = [spawn(Part, name=f"beside_{n}", namespace=NAMESPACE) for n in range(3)]
    everyone = [*others[:2], part, others[2], Part()]
    assert await actor.first_death(everyone, LIMIT_S) is None
    os.kill(await others[1].pid(), signal.SIGKILL)
    died = await actor.first_death(everyone, LIMIT_S)
    assert died is not None and "beside_1" in str(died)
    for other in others:
        actor.kill(other)


async def test_a_process_without_a_sign_is_let_be(part: Part) -> None:
    process = psutil.Process(await part.pid())
    process.suspend()
    try:
        assert await actor.first_death([part], timeout_s=0.2) is None
    finally:
        process.resume()


async def test_kill_ends_the_process(part: Part) -> None:
    process = psutil.Process(await part.pid())
    actor.kill(part)
    await end_of(part.add)
    await asyncio.to_thread(process.wait, LIMIT_S)
    actor.kill(part)
    actor.kill(Part())


async def test_a_dead_name_can_be_started_again(part: Part, request) -> None:
    await part.add()
    actor.kill(part)
    await end_of(part.add)
    again = spawn(Part, 5, name=request.node.name, namespace=NAMESPACE)
    assert await again.add() == 6
    actor.kill(again)


async def test_cancelling_a_call_cancels_it_over_there(part: Part) -> None:
    call = asyncio.create_task(part.sleep())
    while not await part.events():
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(LIMIT_S):
        while await part.events() != ["asleep", "cancelled"]:
            await asyncio.sleep(0.05)


async def test_a_timeout_here_frees_the_part_over_there(part: Part) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await part.sleep()
    assert await part.add() == 1


async def test_a_stand_in_can_be_sent(part: Part) -> None:
    other = spawn(Part, 10, name="other", namespace=NAMESPACE)
    assert await part.ask(other, 5) == 15
    assert await other.add(0) == 15
    actor.kill(other)
    assert "other" in str(await end_of(lambda: part.ask(other, 5)))


async def test_calls_overlap(part: Part) -> None:
    calls = [asyncio.create_task(part.sleep()) for _ in range(20)]
    while len(await part.events()) < 20:
        await asyncio.sleep(0.01)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_shared_values_are_read_in_place(part: Part) -> None:
    reference = actor.put(np.ones(1_000_000))
    assert await part.total(reference) == (1_000_000.0, False, True)
    array = actor.fetch(reference)
    assert isinstance(array, np.ndarray) and not array.flags.owndata


async def test_a_value_lost_with_its_process_says_so(part: Part) -> None:
    reference = await part.put_here()
    assert isinstance(actor.fetch(reference, LIMIT_S), np.ndarray)
    os.kill(await part.pid(), signal.SIGKILL)
    await end_of(part.add)
    with pytest.raises((ProcessDied, TimeoutError)):
        while True:  # the store gives it until it notices
            actor.fetch(reference, 5)
            await asyncio.sleep(0.05)


async def test_environment_of_the_process() -> None:
    named = spawn(Environment, name="environment", namespace=NAMESPACE, env_vars={"X": "y"})
    assert await named.variable("X") == "y"
    actor.kill(named)


class Environment:
    """Tells what its process sees."""

    async def variable(self, name: str) -> str | None:
        return os.environ.get(name)


async def test_is_remote(part: Part) -> None:
    assert actor.is_remote(part) and not actor.is_remote(Part())
