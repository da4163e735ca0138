"""`ApiServer`: models over HTTP, in a thread of this process; `serve_model` for single runs."""

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from trinity.common.extras import needed

if TYPE_CHECKING:
    from fastapi import APIRouter, Request

    from trinity.common.experience import Experience
    from trinity.common.models.wrapper import ModelWrapper

    OnChat = Callable[[str, list[Experience]], None]

_START_TIMEOUT_S = 100.0


class ApiServer:
    """OpenAI's API over some models, each under a path of its own.

    Lifecycle: ``start`` -> requests -> ``stop``. It runs in a thread with an event loop of its
    own, so it answers whatever the process is busy with.

    Args:
        host: Where it listens; other machines can reach it only if this is changed.
        port: 0: any free one.
        api_key: None: made up; see `api_key`.

    Attributes (set them before ``start``):
        on_chat: Is told the id and the experiences of every chat reply.
        routes: Further routes.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, api_key: str | None = None) -> None:
        self._host, self._port = host, port
        self.api_key = api_key or secrets.token_urlsafe(24)
        self.on_chat: OnChat | None = None
        self.routes: Sequence[APIRouter] = ()
        self._models: Mapping[str, ModelWrapper] = {}
        self._server: object = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """``http://host:port``, once started."""
        return f"http://{self._host}:{self._port}"

    def start(self, models: "Mapping[str, ModelWrapper]") -> None:
        """Answer requests for ``models``: path -> model, "" being the root.

        Raises:
            OSError: The port is taken.
            MissingExtraError: FastAPI or uvicorn is not installed.
        """
        needed("fastapi", "api")
        uvicorn = needed("uvicorn", "api")
        from trinity.common.models.api.app import create_app

        self._models = models
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self._host, self._port))
        except OSError as error:
            listener.close()
            raise OSError(f"Port {self._port} of {self._host} can't be had: {error}") from error
        self._port = listener.getsockname()[1]
        app = create_app(lambda path: self._models.get(path), self.api_key, self.on_chat)
        for router in self.routes:
            app.include_router(router)
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        self._server = server
        self._thread = threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets=[listener])),
            name="model-api",
            daemon=True,
        )
        self._thread.start()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise OSError(f"The API server at {self.address} did not start.")
            time.sleep(0.005)

    def check(self, request: "Request") -> None:
        """Refuse a request without the key, in further routes."""
        from trinity.common.models.api.app import check_key

        check_key(request, self.api_key)

    def stop(self) -> None:
        """Answer what is under way and end."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True  # type: ignore[attr-defined]  # a uvicorn.Server
            self._thread.join(timeout=10)
            self._thread = None


_runs: "WeakValueDictionary[str, ModelWrapper]" = WeakValueDictionary()
_shared: ApiServer | None = None
_lock = threading.Lock()


def serve_model(model: "ModelWrapper") -> tuple[str, str]:
    """Address and key under which this process serves ``model``, as long as it is held.

    All models of a process share one server; each has a path that can't be guessed, so that what
    concurrent runs ask is kept apart.
    """
    global _shared
    with _lock:
        if _shared is None:
            server = ApiServer()
            server.start(_runs)
            _shared = server
        path = secrets.token_urlsafe(12)
        _runs[path] = model
        return f"{_shared.address}/{path}", _shared.api_key
