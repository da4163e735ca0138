"""Run calls in child processes that are killed at their deadline. The child's side is at the end.

Call and arguments are pickled between this process and children it started itself; they must be
importable there. Children load the plugin folders and end with their parent.
"""

import contextlib
import ctypes
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from trinity.utils.plugins import load_plugins_from_env
from trinity.utils.threads import CallTimeout, DeadlinePool

_START_TIMEOUT_S = 300.0  # a machine at work may import for minutes
_LENGTH = struct.Struct("<Q")
_SET_PARENT_DEATH_SIGNAL = 1


class ProcessPool:
    """Child processes, started as needed, each making one call at a time."""

    def __init__(self, num_processes: int | None = None) -> None:
        num_processes = num_processes or min(4, os.cpu_count() or 1)
        self._threads = DeadlinePool(num_processes, "isolated")
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        weakref.finalize(self, _kill_all, self._all)

    async def run(
        self, call: Callable[..., Any], kwargs: Mapping[str, object], timeout_s: float
    ) -> Any:
        """What ``call(**kwargs)`` returns or raises in a child.

        If ``call`` has a method ``prepare``, it is called first, before the time counts.

        Raises:
            CallTimeout: It was not done after ``timeout_s`` seconds, and the child was killed.
            ConnectionError: The child died.
        """
        request = pickle.dumps((call, dict(kwargs)))
        result, error = await self._threads.run(lambda: self._run(request, timeout_s))
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Kill all children."""
        _kill_all(self._all)
        self._idle.clear()
        self._threads.close()

    def _run(self, request: bytes, timeout_s: float) -> tuple[Any, Exception | None]:
        try:
            child = self._idle.pop()
        except IndexError:
            child = _Child()
            self._all.add(child)
        try:
            outcome = child.call(request, timeout_s)
        except BaseException:
            child.kill()
            self._all.discard(child)
            raise
        self._idle.append(child)
        return outcome


class _Child:
    """A process and its two pipes. Blocking: it is used from threads."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from trinity.utils.isolate import serve_calls; serve_calls()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def call(self, request: bytes, timeout_s: float) -> tuple[Any, Exception | None]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(_LENGTH.pack(len(request)) + request)
        except BrokenPipeError:
            raise ConnectionError("its process died") from None
        self._reply(_START_TIMEOUT_S)  # imports done, the call begins
        outcome: tuple[Any, Exception | None] = pickle.loads(self._reply(timeout_s))
        return outcome

    def _reply(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        try:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
            return self._read(length, deadline)
        except TimeoutError:
            raise CallTimeout(f"not done after {timeout_s:g} s, its process was killed") from None

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        parts = []
        while size:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            part = os.read(pipe, min(size, 2**20))
            if not part:
                raise ConnectionError("its process died")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()


def _kill_all(children: set[_Child]) -> None:
    for child in list(children):
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
        is_ready = False
        try:
            call, kwargs = pickle.loads(request)
            getattr(call, "prepare", _nothing)()
            _send(answers, b"")
            is_ready = True
            outcome: tuple[object, Exception | None] = call(**kwargs), None
        except Exception as error:  # goes to the parent
            outcome = None, error
            if not is_ready:
                _send(answers, b"")
        _send(answers, _picklable(outcome))


def _nothing() -> None:
    pass


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
