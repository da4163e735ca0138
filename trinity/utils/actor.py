"""Run a plain class as a named Ray actor, and call it as if it were local."""

import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

T = TypeVar("T")


class ProcessDied(ConnectionError):
    """The process behind a stand-in is gone."""


class _Remote:
    """Stands in for an object that lives in an actor: `await remote.method(...)`.

    Like the real one it gives coroutines, and its errors are the real ones; a dead process is
    `ProcessDied`. It can be sent to other actors. Only async methods cross: attributes do not.
    """

    def __init__(self, actor: ActorHandle, name: str) -> None:
        self._actor = actor
        self._name = name

    def __getattr__(self, method: str) -> Callable[..., Coroutine[object, object, object]]:
        if method.startswith("_"):  # pickle asks for dunders before _actor is set
            raise AttributeError(method)

        async def call(*args: object, **kwargs: object) -> object:
            try:
                return await getattr(self._actor, method).remote(*args, **kwargs)
            except RayActorError as error:
                raise ProcessDied(f"{self._name}: {_cause_of_death(error)}") from None
            except RayTaskError as error:
                cause = getattr(error, "cause", None)
                raise (cause if isinstance(cause, Exception) else error) from error

        return call

    def __reduce__(self) -> tuple[type, tuple[ActorHandle, str]]:
        return _Remote, (self._actor, self._name)


def spawn(
    cls: type[T],
    *args: object,
    name: str,
    namespace: str,
    num_cpus: float = 0,
    num_gpus: float = 0,
    max_concurrency: int = 1000,
    env_vars: Mapping[str, str] | None = None,
    is_detached: bool = False,
    **kwargs: object,
) -> T:
    """Start ``cls`` as the actor ``name``, or join it if it runs, and return a stand-in for it.

    Args:
        max_concurrency: Async calls the actor runs side by side.
        env_vars: Set in the actor's process before anything is imported there.
        is_detached: It outlives the process that started it, until somebody kills it.
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
    }
    handle = ray.remote(cls).options(**options).remote(*args, **kwargs)
    return cast(T, _Remote(handle, name))


def connect(name: str, namespace: str) -> object | None:
    """A stand-in for the actor ``name`` started by some other process, or None if there is none."""
    try:
        return _Remote(ray.get_actor(name, namespace=namespace), name)
    except ValueError:
        return None


def kill(stand_in: object) -> None:
    """End the process behind a stand-in at once. Plain objects and dead ones are left alone."""
    if isinstance(stand_in, _Remote):
        with contextlib.suppress(ValueError, RayActorError):
            ray.kill(stand_in._actor, no_restart=True)


def is_remote(thing: object) -> bool:
    """Whether ``thing`` is a stand-in for an object in another process."""
    return isinstance(thing, _Remote)


def put(value: object) -> object:
    """Keep ``value`` in the cluster's shared memory; the reference can be sent anywhere."""
    return [ray.put(value)]  # in a list: Ray resolves bare references in arguments


def fetch(reference: object, timeout_s: float | None = None) -> object:
    """The value behind a reference of `put`; `TimeoutError` after ``timeout_s`` seconds."""
    try:
        return ray.get(cast(list, reference)[0], timeout=timeout_s)
    except GetTimeoutError as error:
        raise TimeoutError(f"No value from the object store within {timeout_s} s.") from error


def _cause_of_death(error: RayActorError) -> str:
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    wanted = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    return f"the process ended ({(wanted or lines or ['no cause known'])[-1]})"
