"""The secret that processes of a Ray cluster show each other: its ports are open to the network."""

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_DEFAULT_PATH = Path("~/.ray/auth_token")


@contextmanager
def own_token() -> Iterator[None]:
    """For the block, a cluster started here takes orders from its own processes only."""
    if _MODE in os.environ:
        yield
        return
    token = os.environ.get(_TOKEN) or secrets.token_hex(32)
    with _environment({_MODE: "token", _TOKEN: token}):
        yield


@contextmanager
def known_token() -> Iterator[None]:
    """For the block, show the token of this user to the cluster that is joined, if there is one."""
    is_known = {_TOKEN, _TOKEN_PATH} & os.environ.keys() or _DEFAULT_PATH.expanduser().is_file()
    with _environment({_MODE: "token"} if is_known and _MODE not in os.environ else {}):
        yield


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    _reread_environment()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _reread_environment()


def _reread_environment() -> None:
    """Make Ray's compiled part see the environment as it is now. Ray before 2.52 has no tokens."""
    with contextlib.suppress(ImportError, AttributeError):
        raylet: Any = import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()
