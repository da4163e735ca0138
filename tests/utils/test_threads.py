import asyncio
import contextlib
import threading
import time

import pytest

from trinity.utils import threads
from trinity.utils.isolate import ProcessPool
from trinity.utils.threads import CallTimeout, DeadlinePool, outwait, run_sync

LIMIT_S = 60  # far more than anything here takes, unless it never ends


async def test_calls_run_side_by_side_and_keep_their_errors():
    pool, meeting = DeadlinePool(4), threading.Barrier(4)
    at_once: list[int] = []

    def meet(number):
        at_once.append(number)
        most = len(at_once)
        meeting.wait(LIMIT_S)  # for three others
        at_once.remove(number)
        meeting.wait(LIMIT_S)
        return number, most

    results = await asyncio.gather(*(pool.run(lambda i=i: meet(i)) for i in range(8)))
    assert [number for number, _ in results] == list(range(8))
    assert max(most for _, most in results) == 4
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await pool.run(lambda: next(iter(())))
    pool.close()


async def test_a_loop_is_ended_and_a_sleep_is_counted(monkeypatch):
    pool = DeadlinePool(2)

    def loop():
        while True:
            with contextlib.suppress(Exception):
                pass

    with monkeypatch.context() as patch:
        patch.setattr(threads, "_GRACE_S", LIMIT_S)
        with pytest.raises(CallTimeout, match=r"not done after 0\.2 s") as caught:
            await pool.run(loop, 0.2)
    assert not caught.value.is_stuck and pool.num_stuck == 0
    with pytest.raises(CallTimeout) as caught:
        await pool.run(lambda: time.sleep(20), 0.1)
    assert caught.value.is_stuck and pool.num_stuck == 1
    assert await pool.run(lambda: 1) == 1


async def test_cancelling_abandons_the_call():
    pool = DeadlinePool(1)
    begun, ended = threading.Event(), threading.Event()

    def loop():
        try:
            begun.set()
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    waiting = asyncio.create_task(pool.run(loop))
    assert await asyncio.to_thread(begun.wait, LIMIT_S)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.wait(LIMIT_S)


async def test_a_cancel_waits_until_what_is_outwaited_ends():
    work = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(outwait(work, 600))
    for _ in range(2):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    work.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await outwait(work, 600)


async def test_run_sync_inside_and_outside_of_a_loop():
    async def add(a, b):
        await asyncio.sleep(0)
        return a + b

    assert run_sync(add(1, 2)) == 3
    assert await asyncio.to_thread(lambda: run_sync(add(3, 4))) == 7


def fail():
    raise ValueError("from the child")


def die():
    import os

    os._exit(3)


async def test_isolated_calls():
    pool = ProcessPool(2)
    assert await pool.run(dict, {"a": 1}, LIMIT_S) == {"a": 1}
    with pytest.raises(ValueError, match="from the child"):
        await pool.run(fail, {}, LIMIT_S)
    with pytest.raises(ConnectionError):
        await pool.run(die, {}, LIMIT_S)
    with pytest.raises(CallTimeout, match="killed"):
        async with asyncio.timeout(LIMIT_S):
            await pool.run(forever, {}, 0.5)
    assert await pool.run(dict, {"b": 2}, LIMIT_S) == {"b": 2}
    pool.close()


def forever():
    10 ** (10**10)
