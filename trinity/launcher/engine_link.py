"""An engine in one terminal, used from another: over a socket file of this user, msgpack only.

For `trinity debug`, which loads a model once and tries a workflow many times.
"""

import asyncio
import contextlib
import hashlib
import os
import struct
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgpack

from trinity.common.models.protocol import (
    Completion,
    InferenceEngine,
    SamplingParams,
    WeightTicket,
)

_MAX_PLACE = 60  # a socket's path has room for about 100 bytes
_LENGTH = struct.Struct("<I")


def socket_path(label: str) -> Path:
    """Where the engine of ``label`` listens: in a folder that only this user may enter."""
    place = tempfile.gettempdir()
    is_short = len(place) <= _MAX_PLACE
    folder = Path(place if is_short else "/tmp") / f"trinity_debug_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
        raise PermissionError(f"{folder} belongs to others; remove it.")
    return folder / f"{hashlib.blake2b(label.encode(), digest_size=8).hexdigest()}.sock"


class EngineServer:
    """Serves one engine. ``start`` -> requests -> ``close``."""

    def __init__(self, engine: InferenceEngine, path: Path) -> None:
        self._engine = engine
        self._path = path
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            try:
                answer: object = {"result": await self._answer(await _read(reader))}
            except (asyncio.IncompleteReadError, ConnectionError):
                raise
            except Exception as error:  # goes to the other terminal
                answer = {"error": f"{type(error).__name__}: {error}"}
            await _write(writer, answer)
        writer.close()

    async def _answer(self, request: dict[str, Any]) -> object:
        engine = self._engine
        if request["call"] == "sample":
            params = dict(request["params"])
            for name in ("stop", "stop_token_ids"):
                params[name] = tuple(params[name])
            found = await engine.sample(request["prompt_ids"], SamplingParams(**params))
            return [asdict(replace(completion, routes=None)) for completion in found]
        if request["call"] == "partial":
            return await engine.partial(request["request_id"])
        if request["call"] == "logprobs":
            return await engine.logprobs(request["token_ids"], request["temperature"])
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "version": engine.version,
            "health": engine.health,
        }
        return await calls[request["call"]]()


class EngineClient:
    """The engine of another terminal (an `InferenceEngine` that takes no weights)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def prepare(self) -> None:
        """`ConnectionError` or `FileNotFoundError` if no engine listens."""
        await self.version()

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str | None = None
    ) -> list[Completion]:
        request: dict[str, object] = {
            "call": "sample",
            "prompt_ids": list(prompt_ids),
            "params": asdict(params),
        }
        return [Completion(**fields) for fields in await self._ask(request)]

    async def partial(self, request_id: str) -> list[list[int]]:
        found: list[list[int]] = await self._ask({"call": "partial", "request_id": request_id})
        return found

    async def logprobs(
        self, token_ids: Sequence[int], temperature: float = 1.0, adapter: str | None = None
    ) -> list[float]:
        request: dict[str, object] = {"call": "logprobs", "token_ids": list(token_ids)}
        request["temperature"] = temperature
        found: list[float] = await self._ask(request)
        return found

    async def load_weights(self, ticket: WeightTicket) -> str:
        raise NotImplementedError("The engine of a debug session keeps its weights.")

    async def pause(self) -> None:
        raise NotImplementedError("The engine of a debug session is not paused.")

    async def resume(self) -> None:
        raise NotImplementedError("The engine of a debug session is not paused.")

    async def version(self) -> int:
        return int(await self._ask({"call": "version"}))

    async def health(self) -> dict[str, float]:
        return dict(await self._ask({"call": "health"}))

    async def close(self) -> None:
        """The engine goes on in its terminal."""

    async def _ask(self, request: dict[str, object]) -> Any:
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            await _write(writer, request)
            answer = await _read(reader)
        finally:
            writer.close()
        if "error" in answer:
            raise RuntimeError(f"In the engine: {answer['error']}")
        return answer["result"]


async def _read(reader: asyncio.StreamReader) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    message: dict[str, Any] = msgpack.unpackb(await reader.readexactly(length))
    return message


async def _write(writer: asyncio.StreamWriter, message: object) -> None:
    payload = msgpack.packb(message)
    writer.write(_LENGTH.pack(len(payload)) + payload)
    await writer.drain()
