"""The Data-Juicer service: `python -m trinity.service.data_juicer.server --port 5005`.

It runs in any environment that has Data-Juicer, and speaks JSON over HTTP::

    GET  /health                               {"status": "ok", "version": ...}
    POST /create              {process, num_process}      -> {"session": id}
    POST /process_experience  {session, rows}             -> {"rows": [...], "metrics": {...}}
    POST /process_task        the same, for tasks
    POST /close               {session}                   -> {}

An error is a status of 400 or above with {"error": text}. It listens on loopback unless told
otherwise; it knows no passwords.
"""

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from secrets import token_hex
from typing import Any, Protocol, TypeVar

from trinity.service.data_juicer.juicer import Juicer

T = TypeVar("T")


class MainThread:
    """Runs functions in the thread that calls `work`, one after the other.

    Data-Juicer forks processes, which is safe from the main thread only.
    """

    def __init__(self) -> None:
        self._jobs: Queue[tuple[Callable[[], Any], Future[Any]]] = Queue()

    def run(self, function: Callable[[], T]) -> T:
        """The result of ``function``, called over there."""
        future: Future[T] = Future()
        self._jobs.put((function, future))
        return future.result()

    def work(self) -> None:
        """Never returns."""
        while True:
            function, future = self._jobs.get()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)


class Sessions:
    """The operator lists of all clients. One of them works at a time."""

    def __init__(self, main: MainThread) -> None:
        self._sessions: dict[str, Juicer] = {}
        self._main = main

    def create(self, request: dict[str, Any]) -> dict[str, Any]:
        process, num_process = request["process"], int(request.get("num_process", 1))
        session = token_hex(8)
        self._sessions[session] = self._main.run(lambda: Juicer(process, num_process))
        return {"session": session}

    def process(self, request: dict[str, Any]) -> dict[str, Any]:
        juicer, rows = self._sessions[request["session"]], request["rows"]
        kept, metrics = self._main.run(lambda: juicer.run(rows))
        return {"rows": kept, "metrics": metrics}

    def close(self, request: dict[str, Any]) -> dict[str, Any]:
        self._sessions.pop(request["session"], None)
        return {}


class Actions(Protocol):
    """What the service does; a request and its answer are JSON objects."""

    def create(self, request: dict[str, Any]) -> dict[str, Any]: ...

    def process(self, request: dict[str, Any]) -> dict[str, Any]: ...

    def close(self, request: dict[str, Any]) -> dict[str, Any]: ...


class _Handler(BaseHTTPRequestHandler):
    sessions: Actions
    version: str
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {"status": "ok", "version": self.version})
        else:
            self._answer(404, {"error": f"No such address: {self.path}"})

    def do_POST(self) -> None:
        actions = {
            "/create": self.sessions.create,
            "/process_experience": self.sessions.process,
            "/process_task": self.sessions.process,
            "/close": self.sessions.close,
        }
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        action = actions.get(self.path)
        if action is None:
            self._answer(404, {"error": f"No such address: {self.path}"})
            return
        try:
            self._answer(200, action(json.loads(body)))
        except KeyError as error:
            self._answer(404, {"error": f"No such session or field: {error}"})
        except Exception as error:  # an operator's own: it goes to the client as text
            self._answer(400, {"error": f"{type(error).__name__}: {error}"})

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value, default=str).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of single requests."""


def make_server(host: str, port: int, actions: Actions, version: str) -> ThreadingHTTPServer:
    """A server that answers by ``actions``, each request in a thread of its own."""
    handler = type("Handler", (_Handler,), {"sessions": actions, "version": version})
    return ThreadingHTTPServer((host, port), handler)


def serve(host: str, port: int) -> None:
    """Answer requests until the process ends."""
    import data_juicer
    from loguru import logger

    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    main = MainThread()
    server = make_server(host, port, Sessions(main), data_juicer.__version__)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    main.work()


def _end_with_parent() -> None:
    """End when whoever started us does: our standard input then closes.

    Not by way of `sys.stdin`: its lock, held here, would stop every forked process.
    """
    while os.read(0, 1):
        pass
    os._exit(0)


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description="Data-Juicer over HTTP")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5005)
    parser.add_argument("--with-parent", action="store_true", help="end when stdin closes")
    arguments = parser.parse_args()
    if arguments.with_parent:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    serve(arguments.host, arguments.port)


if __name__ == "__main__":
    main()
