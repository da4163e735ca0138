"""Run blocking code beside the event loop, each call with a deadline.

Python can't end a thread. A call past its deadline gets `Abandoned` raised inside it, which ends
pure Python code; code that sleeps in C goes on, its thread is given up and counted.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")

_GRACE_S = 0.5
_TURN_S = 0.2
_NUM_SHARED = 128


class Abandoned(BaseException):
    """Raised inside a call whose deadline is over. No `Exception`: broad catches let it pass."""


class CallTimeout(TimeoutError):
    """A call took longer than its deadline. ``is_stuck``: its thread can't be ended either."""

    def __init__(self, message: str, is_stuck: bool = False) -> None:
        super().__init__(message, is_stuck)
        self.message, self.is_stuck = message, is_stuck

    def __str__(self) -> str:
        return self.message


class DeadlinePool:
    """Threads that are reused, and given up when a call does not end in time.

    Args:
        num_threads: Calls side by side; more wait, without using up their time.
    """

    def __init__(self, num_threads: int, name: str = "call") -> None:
        self._free = asyncio.Semaphore(num_threads)
        self._idle: list[_Worker] = []
        self._name = name
        self.num_stuck = 0
        weakref.finalize(self, _stop_all, self._idle)

    async def run(self, call: Callable[[], T], timeout_s: float | None = None) -> T:
        """What ``call()`` returns or raises; `CallTimeout` after ``timeout_s`` seconds.

        Cancelling the waiting coroutine abandons the call likewise.
        """
        async with self._free:
            worker = self._idle.pop() if self._idle else _Worker(self._name)
            future = worker.start(contextvars.copy_context(), call)
            try:
                done, _ = await asyncio.wait({future}, timeout=timeout_s)
            except asyncio.CancelledError:
                await self._give_up(worker, future)
                raise
            if not done:
                is_stuck = await self._give_up(worker, future)
                raise CallTimeout(f"not done after {timeout_s:g} s", is_stuck)
            self._idle.append(worker)
            return future.result()

    def close(self) -> None:
        """End the idle threads."""
        _stop_all(self._idle)

    async def _give_up(self, worker: "_Worker", future: asyncio.Future) -> bool:
        """Abandon the call of ``worker``; whether its thread lives on all the same."""
        worker.abandon()
        future.add_done_callback(_retrieve)  # it was asked for: no "never retrieved" warning
        try:
            await outwait(future, _GRACE_S)
        finally:
            self.num_stuck += not future.done()
        return not future.done()


async def outwait(work: asyncio.Future[T], timeout_s: float) -> None:
    """Wait up to ``timeout_s`` for ``work``; a cancel meanwhile waits as well, and is raised then.

    What is left of a call is judged after its grace, however often it is given up.
    """
    waiting = asyncio.ensure_future(asyncio.wait({work}, timeout=timeout_s))
    was_cancelled = False
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            was_cancelled = True
    if was_cancelled:
        raise asyncio.CancelledError


class _Worker:
    """One daemon thread that makes one call at a time."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def start(self, context: contextvars.Context, call: Callable[[], T]) -> "asyncio.Future[T]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.put((loop, future, context, call))
        return future

    def abandon(self) -> None:
        """Raise `Abandoned` in the thread, which ends with its call."""
        self._is_abandoned = True
        self.stop()
        if self._thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(Abandoned)
            )

    def stop(self) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        with contextlib.suppress(Abandoned):  # it may strike between the call and its report
            while not self._is_abandoned and (item := self._calls.get()) is not None:
                loop, future, context, call = item
                try:
                    result, error = context.run(call), None
                except BaseException as raised:  # goes to the waiting coroutine
                    result, error = None, raised
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(_report, future, result, error)
                del item, future, context, call, result, error


def _stop_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().stop()


def _report(future: asyncio.Future, result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # a future can't carry it
        future.set_exception(RuntimeError(f"StopIteration was raised: {error}"))
    else:
        future.set_exception(error)


def _retrieve(future: asyncio.Future) -> None:
    if not future.cancelled():
        future.exception()


_SHARED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, DeadlinePool]
_SHARED = weakref.WeakKeyDictionary()


def shared_threads() -> DeadlinePool:
    """The threads of the running event loop, for whoever has a blocking call to make."""
    loop = asyncio.get_running_loop()
    if loop not in _SHARED:
        _SHARED[loop] = DeadlinePool(_NUM_SHARED, "shared")
    return _SHARED[loop]


def run_sync(coroutine: Coroutine[object, object, T]) -> T:
    """The result of ``coroutine``, for callers that are not async; also beside a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    outcome: queue.SimpleQueue = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.put((asyncio.run(coroutine), None))
        except BaseException as error:  # goes to the caller
            outcome.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    while True:
        with contextlib.suppress(queue.Empty):  # in turns: `Abandoned` strikes between them
            result, error = outcome.get(timeout=_TURN_S)
            break
    if error is not None:
        raise error
    return result
