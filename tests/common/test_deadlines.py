import asyncio

import pytest

from trinity.common.deadlines import together, within
from trinity.common.errors import DeadlineError


async def test_the_first_that_fails_ends_the_others() -> None:
    ended = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        await together(waits(), fails())
    assert ended.is_set()


async def test_all_are_waited_for() -> None:
    done: list[int] = []

    async def work(number: int) -> None:
        await asyncio.sleep(0)
        done.append(number)

    await together(work(1), work(2), asyncio.create_task(work(3)))
    assert sorted(done) == [1, 2, 3]


async def test_a_deadline_names_who_was_waited_for() -> None:
    with pytest.raises(DeadlineError, match="the trainer"):
        await within(0.01, asyncio.sleep(60), "the trainer", "the start")
