"""Which rank is blamed when collectives fail because the process of one ended."""

import asyncio

import pytest
import ray.exceptions

from trinity.trainer.backends.torch.rank_group import RankGroup
from trinity.utils.actor import ProcessDied, _Outcome, _Remote

LIMIT_S = 60


class Calls:
    """Calls of one method of an actor, each of which ends when the test says."""

    def __init__(self) -> None:
        self.replies: list[asyncio.Future] = []

    def options(self, **_: object) -> "Calls":
        return self

    def remote(self, *_: object) -> asyncio.Future:
        self.replies.append(asyncio.get_running_loop().create_future())
        return self.replies[-1]

    async def next(self, number: int) -> asyncio.Future:
        """The call of this number, once it is made."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.replies) <= number:
                await asyncio.sleep(0)
        return self.replies[number]


class Rank:
    """What Ray shows of a rank's actor."""

    def __init__(self) -> None:
        self.call, self.sign_of_life = Calls(), Calls()

    def die(self) -> None:
        """Ray has heard of the death, and every open call learns of it."""
        for reply in [*self.call.replies, *self.sign_of_life.replies]:
            if not reply.done():
                reply.set_exception(ray.exceptions.ActorDiedError())


async def joining(ranks: list[Rank]) -> asyncio.Task:
    """A group in its collective of joining."""
    group = RankGroup([_Remote(rank, f"rank_{n}") for n, rank in enumerate(ranks)], None)
    task = asyncio.create_task(group.prepare())
    for rank in ranks:
        (await rank.call.next(0)).set_result(_Outcome("host:1"))
    for rank in ranks:
        await rank.call.next(1)
    return task


async def fail(rank: Rank, text: str) -> None:
    (await rank.call.next(1)).set_result(_Outcome(text=text))


async def lives(rank: Rank) -> None:
    (await rank.sign_of_life.next(0)).set_result(None)


async def test_a_dead_rank_is_blamed_however_late_the_news_of_it_comes():
    ranks = [Rank() for _ in range(4)]
    task = await joining(ranks)
    for rank in (ranks[3], ranks[0], ranks[2]):
        await fail(rank, "RuntimeError: Connection closed by peer")
    for rank in (ranks[0], ranks[2], ranks[3]):
        await lives(rank)
    await ranks[1].sign_of_life.next(0)
    await asyncio.sleep(0)
    assert not task.done()
    ranks[1].die()
    with pytest.raises(ProcessDied, match="rank_1: "):
        await asyncio.wait_for(task, LIMIT_S)


async def test_of_living_ranks_the_first_that_failed_is_blamed():
    ranks = [Rank() for _ in range(3)]
    task = await joining(ranks)
    await fail(ranks[2], "ValueError: the loss is no number")
    await ranks[0].sign_of_life.next(0)
    await fail(ranks[0], "RuntimeError: Connection closed by peer")
    for rank in ranks:
        await lives(rank)
    with pytest.raises(RuntimeError, match="the loss is no number") as told:
        await asyncio.wait_for(task, LIMIT_S)
    assert "This was rank 2 of 3." in told.value.__notes__


async def test_of_two_dead_ranks_the_first_of_the_news_is_blamed():
    ranks = [Rank() for _ in range(3)]
    task = await joining(ranks)
    ranks[2].die()
    ranks[0].die()
    with pytest.raises(ProcessDied, match="rank_2: "):
        await asyncio.wait_for(task, LIMIT_S)
