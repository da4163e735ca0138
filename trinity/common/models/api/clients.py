"""OpenAI clients whose requests go straight to a model of this process, without a socket."""

from functools import cache
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import httpx

from trinity.common.extras import needed
from trinity.utils.threads import run_sync

if TYPE_CHECKING:
    from fastapi import FastAPI
    from openai import AsyncOpenAI, OpenAI

    from trinity.common.models.wrapper import ModelWrapper

_KEY = "in-process"
_HOST = "http://model.trinity"

_models: "WeakValueDictionary[str, ModelWrapper]" = WeakValueDictionary()


def openai_client(model: "ModelWrapper") -> "OpenAI":
    """A client for code that is not async."""
    http = httpx.Client(transport=_SyncTransport(_app(), model))
    client: OpenAI = _made(needed("openai", "api").OpenAI, http, model)
    return client


def openai_async_client(model: "ModelWrapper") -> "AsyncOpenAI":
    """A client for async code."""
    http = httpx.AsyncClient(transport=_AsyncTransport(_app(), model))
    client: AsyncOpenAI = _made(needed("openai", "api").AsyncOpenAI, http, model)
    return client


def _made(kind: Any, http: object, model: "ModelWrapper") -> Any:  # either of openai's two clients
    base = _base_url(model)
    client = kind(base_url=base, api_key=_KEY, http_client=http, max_retries=0)
    client.model_path = model.model_path  # documented, of ours
    return client


@cache
def _app() -> "FastAPI":
    needed("fastapi", "api")
    from trinity.common.models.api.app import create_app

    return create_app(_models.get, api_key=None)


def _base_url(model: "ModelWrapper") -> str:
    path = token_urlsafe(12)
    _models[path] = model
    return f"{_HOST}/{path}/v1"


class _AsyncTransport(httpx.ASGITransport):
    """Answers from the app of this process; holds the model as long as the client lives."""

    def __init__(self, app: "FastAPI", model: "ModelWrapper") -> None:
        super().__init__(app, raise_app_exceptions=False)
        self._model = model


class _SyncTransport(httpx.BaseTransport):
    """Has the async transport answer, for a client that is not async."""

    def __init__(self, app: "FastAPI", model: "ModelWrapper") -> None:
        self._transport = _AsyncTransport(app, model)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return run_sync(self._answer(request))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        request.read()
        asked = httpx.Request(
            request.method, request.url, headers=request.headers, content=request.content
        )
        found = await self._transport.handle_async_request(asked)
        body = await found.aread()
        return httpx.Response(found.status_code, headers=found.headers, content=body)
