"""Run a plain class as a named Ray actor, and call it as if it were local.

Ray sees one actor class, `Process`, which holds the object: so errors cross as what they are, with
the far traceback as a note, whatever Ray makes of them.
"""

import asyncio
import contextlib
import os
import pickle
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from trinity.utils.plugins import load_plugins_from_env

T = TypeVar("T")

_KILLED = "the process was killed or crashed, without an error of its own"
_DEATHS = (RayActorError, OutOfMemoryError, WorkerCrashedError, NodeDiedError)


class ProcessDied(ConnectionError):
    """The process behind a stand-in is gone.

    ``comes_back``: whether it is being started again.
    """

    comes_back = False


class ProcessRestarted(ProcessDied):
    """The process behind a stand-in died and is started again; it is not ready yet."""

    comes_back = True


class _Outcome(NamedTuple):
    """What a call came to. An error travels pickled, since the caller may not know its class."""

    value: object = None
    error: bytes = b""
    text: str = ""
    trace: str = ""
    is_stillborn: bool = False


class Process:
    """The far side: holds the object and makes the calls.

    One that was started again after a death holds a new object, which has none of what the old one
    was told. It takes calls of `repairing` stand-ins only, until `reopen`.
    """

    def __init__(
        self, make: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        self._failure: _Outcome | None = None
        self._is_open = not ray.get_runtime_context().was_current_actor_reconstructed
        try:
            load_plugins_from_env()  # calls may bring objects of theirs
            self._object = make(*args, **kwargs)
        except BaseException as error:  # told to whoever calls first
            self._failure = _failed(error)._replace(is_stillborn=True)

    async def reopen(self) -> None:
        """Take the calls of all again."""
        self._is_open = True

    async def sign_of_life(self) -> None:
        """What only a process that lives can answer."""

    async def call(
        self,
        method: str,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        is_repair: bool = False,
    ) -> _Outcome:
        if self._failure is not None:
            return self._failure
        if not (self._is_open or is_repair):
            return _failed(ProcessRestarted("The process died; it is not ready again yet."))
        try:
            return _Outcome(await getattr(self._object, method)(*args, **kwargs))
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # by the caller
            return _failed(error)
        except BaseException as error:  # goes to the caller
            return _failed(error)


def _failed(error: BaseException) -> _Outcome:
    trace = "".join(traceback.format_exception(error)).rstrip()
    outcome = _Outcome(
        text=f"{type(error).__name__}: {error}", trace=f"In process {os.getpid()}:\n{trace}"
    )
    if not isinstance(error, Exception):  # an exit must not end the caller too
        return outcome
    with contextlib.suppress(Exception):  # it holds a lock, a socket ...
        return outcome._replace(error=cloudpickle.dumps(error))
    return outcome


class _Remote:
    """Stands in for an object that lives in an actor: `await remote.method(...)`.

    Like the real one it gives coroutines, and its errors are the real ones; a dead process is
    `ProcessDied`. A cancelled call is cancelled over there. It can be sent to other actors. Only
    async methods cross: attributes do not.
    """

    def __init__(self, actor: ActorHandle, name: str, is_repair: bool = False) -> None:
        self._actor = actor
        self._name = name
        self._is_repair = is_repair

    def __getattr__(self, method: str) -> Callable[..., Coroutine[object, object, object]]:
        if method.startswith("_"):  # pickle asks for dunders before _actor is set
            raise AttributeError(method)

        async def call(*args: object, **kwargs: object) -> object:
            task: Any = self._actor.call.options(name=f"{self._name}.{method}")
            reference: ray.ObjectRef[_Outcome] = task.remote(method, args, kwargs, self._is_repair)
            try:
                outcome = await self._answer(reference)
            except asyncio.CancelledError:
                if ray.is_initialized():  # else `cancel` would start a cluster of its own
                    with contextlib.suppress(Exception):  # the actor is gone, or Ray is
                        ray.cancel(reference)
                raise
            except RayTaskError as error:  # the arguments can't be read there
                raise RuntimeError(f"{self._name}: {_last_line(str(error))}") from error
            if outcome.is_stillborn:
                kill(self)
            return _opened(outcome)

        return call

    async def _answer(self, reference: "ray.ObjectRef[T]") -> T:
        """What the process answers, or how it ended."""
        try:
            return await reference
        except ActorUnavailableError:
            raise ProcessRestarted(f"{self._name}: {_KILLED}; it is started again") from None
        except _DEATHS as error:
            raise ProcessDied(f"{self._name}: {_cause_of_death(error)}") from None

    async def _sign_of_life(self) -> None:
        asked: Any = self._actor.sign_of_life
        await self._answer(asked.remote())

    def __reduce__(self) -> tuple[type, tuple[ActorHandle, str, bool]]:
        return _Remote, (self._actor, self._name, self._is_repair)


def _opened(outcome: _Outcome) -> object:
    """The value of ``outcome``, or its error raised."""
    if not outcome.text:
        return outcome.value
    try:
        error = pickle.loads(outcome.error)
    except Exception:  # its class is not here, or wants other arguments
        error = None
    raised = error if isinstance(error, Exception) else RuntimeError(outcome.text)
    raised.add_note(outcome.trace)
    raise raised


@cache
def _process_class() -> Any:
    return ray.remote(Process)


def spawn(
    make: Callable[..., T],
    *args: object,
    name: str,
    namespace: str,
    num_cpus: float = 0,
    num_gpus: float = 0,
    max_concurrency: int = 1000,
    env_vars: Mapping[str, str] | None = None,
    is_detached: bool = False,
    max_restarts: int = 0,
    **kwargs: object,
) -> T:
    """Start the actor ``name``, or join it if it runs, and return a stand-in for its object.

    Returns at once; the process takes a second to start. It ends with the last stand-in.

    Args:
        make: The object's class, or what else makes it, called in the new process.
        max_concurrency: Async calls the actor runs side by side.
        env_vars: Set in the actor's process before anything is imported there.
        is_detached: It outlives the process that started it, until somebody kills it.
        max_restarts: Times the process is started again after a death. Its new object is to be
            made ready by a `repairing` stand-in; the calls of others raise `ProcessRestarted` until
            `reopen`.
    """
    options = {
        "name": name,
        "namespace": namespace,
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "get_if_exists": True,
        "max_concurrency": max_concurrency,
        "runtime_env": {"env_vars": dict(env_vars)} if env_vars else {},
        "lifetime": "detached" if is_detached else None,
        "max_restarts": max_restarts,
    }
    handle = _process_class().options(**options).remote(make, args, kwargs)
    return cast(T, _Remote(cast(ActorHandle, handle), name))


def connect(name: str, namespace: str) -> object | None:
    """A stand-in for the actor ``name`` started by some other process, or None if there is none."""
    try:
        return _Remote(ray.get_actor(name, namespace=namespace), name)
    except ValueError:
        return None


def kill(stand_in: object) -> None:
    """Have the process behind a stand-in end at once, unasked; for a moment it may still answer.

    Plain objects and dead ones are left alone.
    """
    if isinstance(stand_in, _Remote) and ray.is_initialized():
        with contextlib.suppress(ValueError, RayActorError):
            ray.kill(stand_in._actor, no_restart=True)


def repairing(stand_in: T) -> T:
    """A stand-in whose calls reach a process that is not ready again. Plain objects as they are."""
    if isinstance(stand_in, _Remote):
        return cast(T, _Remote(stand_in._actor, stand_in._name, is_repair=True))
    return stand_in


async def reopen(stand_in: object) -> None:
    """Have a process that was made ready again take the calls of all."""
    if isinstance(stand_in, _Remote):
        reopened: Any = stand_in._actor.reopen
        await reopened.remote()


async def first_death(stand_ins: Sequence[object], timeout_s: float) -> ProcessDied | None:
    """The first process of which news comes that it died; None if all others give a sign of life.

    One that is dead now can't give it, however late Ray hears of its death; so whoever saw a
    connection break off learns here whose end did that. Plain objects live.

    Args:
        timeout_s: After which a process without a sign, whose machine may be gone, is let be.
    """
    remote = [thing for thing in stand_ins if isinstance(thing, _Remote)]
    signs = [asyncio.ensure_future(stand_in._sign_of_life()) for stand_in in remote]
    try:
        for sign in asyncio.as_completed(signs, timeout=timeout_s):
            await sign
    except ProcessDied as error:
        return error
    except TimeoutError:
        return None
    finally:
        for sign in signs:
            sign.cancel()
    return None


def is_remote(thing: object) -> bool:
    """Whether ``thing`` is a stand-in for an object in another process."""
    return isinstance(thing, _Remote)


def put(value: object) -> object:
    """Keep ``value`` in the cluster's shared memory; the reference can be sent anywhere."""
    return ray.put(value)


def fetch(reference: object, timeout_s: float | None = None) -> object:
    """The value behind a reference of `put`; its arrays are read in place and can't be written.

    Raises:
        TimeoutError: It does not come within ``timeout_s`` seconds.
        ProcessDied: The process that put it is gone, and the value with it.
    """
    try:
        return ray.get(cast(ray.ObjectRef, reference), timeout=timeout_s)
    except GetTimeoutError as error:
        raise TimeoutError(f"No value from the object store within {timeout_s} s.") from error
    except ObjectLostError as error:
        raise ProcessDied(f"The value is lost with the process that put it: {error}") from None


def _cause_of_death(error: Exception) -> str:
    text = str(error)
    if "creation task" in text:
        return f"the process could not be set up ({_last_line(text)})"
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        return "the process was ended because the machine ran low on memory"
    if "unexpectedly" in text:
        return _KILLED
    return f"the process ended ({_last_line(text)})"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no cause known"
