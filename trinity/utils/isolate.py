"""Run calls in child processes that are killed at their deadline. The child's side is at the end.

Call and arguments are pickled between this process and children it started itself; they must be
importable there. Children load the plugin folders and end with their parent.
"""

import asyncio
import contextlib
import ctypes
import os
import pickle
import signal
import struct
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from trinity.utils.plugins import load_plugins_from_env
from trinity.utils.threads import CallTimeout

_START_TIMEOUT_S = 60.0
_LENGTH = struct.Struct("<Q")
_SET_PARENT_DEATH_SIGNAL = 1


class ProcessPool:
    """Child processes, started as needed, each making one call at a time."""

    def __init__(self, num_processes: int | None = None) -> None:
        self._free = asyncio.Semaphore(num_processes or min(4, os.cpu_count() or 1))
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        weakref.finalize(self, _kill_all, self._all)

    async def run(
        self, call: Callable[..., Any], kwargs: Mapping[str, object], timeout_s: float
    ) -> Any:
        """What ``call(**kwargs)`` returns or raises in a child.

        Raises:
            CallTimeout: It was not done after ``timeout_s`` seconds, and the child was killed.
            ConnectionError: The child died.
        """
        request = pickle.dumps((call, dict(kwargs)))
        async with self._free:
            child = self._idle.pop() if self._idle else await self._start()
            try:
                result, error = await child.call(request, timeout_s)
            except BaseException:
                child.kill()
                self._all.discard(child)
                raise
            self._idle.append(child)
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Kill all children."""
        _kill_all(self._all)
        self._idle.clear()

    async def _start(self) -> "_Child":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from trinity.utils.isolate import serve_calls; serve_calls()",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**26,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        child = _Child(process)
        self._all.add(child)
        return child


class _Child:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def call(self, request: bytes, timeout_s: float) -> tuple[Any, Exception | None]:
        assert self._process.stdin is not None
        self._process.stdin.write(_LENGTH.pack(len(request)) + request)
        await self._reply(_START_TIMEOUT_S)  # imports done, the call begins
        return pickle.loads(await self._reply(timeout_s))

    async def _reply(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                header = await self._process.stdout.readexactly(_LENGTH.size)
                return await self._process.stdout.readexactly(_LENGTH.unpack(header)[0])
        except TimeoutError:
            raise CallTimeout(f"not done after {timeout_s:g} s, its process was killed") from None
        except asyncio.IncompleteReadError:
            raise ConnectionError("its process died") from None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)


def _kill_all(children: set[_Child]) -> None:
    for child in children:
        child.kill()
    children.clear()


def serve_calls() -> None:
    """The child: read a call, say that it is ready, make it, answer; until the parent is gone."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of the call must not mix with its answers
    load_plugins_from_env()
    requests = sys.stdin.buffer
    while header := requests.read(_LENGTH.size):
        request = requests.read(_LENGTH.unpack(header)[0])
        try:
            call, kwargs = pickle.loads(request)
            _send(answers, b"")
            outcome: tuple[object, Exception | None] = call(**kwargs), None
        except Exception as error:  # goes to the parent
            outcome = None, error
        _send(answers, _picklable(outcome))


def _send(stream: BinaryIO, payload: bytes) -> None:
    stream.write(_LENGTH.pack(len(payload)) + payload)
    stream.flush()


def _picklable(outcome: tuple[object, Exception | None]) -> bytes:
    try:
        payload = pickle.dumps(outcome)
        pickle.loads(payload)
    except Exception:  # an error with a constructor of its own
        return pickle.dumps((None, RuntimeError(f"{outcome[1] or outcome[0]!r}")))
    return payload
