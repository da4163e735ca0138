"""The HTTP routes over models: chat, completions, models, health, metrics."""

from collections.abc import Callable, Iterator
from secrets import compare_digest
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from trinity.common.models.api import responses
from trinity.common.models.api.requests import ChatRequest, CompletionRequest, SamplingRequest

if TYPE_CHECKING:
    from trinity.common.models.wrapper import ModelWrapper

FindModel = Callable[[str], "ModelWrapper | None"]


class ApiError(Exception):
    """Becomes an answer with this status and OpenAI's form of an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


def create_app(find_model: FindModel, api_key: str | None) -> FastAPI:
    """The routes.

    Args:
        find_model: From the first part of a path ("" if the path begins with ``/v1``) to the
            model behind it; None: there is none.
        api_key: What clients must send as bearer token; None: nothing.
    """
    app = FastAPI(title="trinity", openapi_url=None)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _other_error)

    def model_of(request: Request, run: str = "") -> "ModelWrapper":
        _check_key(request, api_key)
        model = find_model(run)
        if model is None:
            raise ApiError(404, f"No run is called {run!r} here; it may have ended.")
        return model

    for prefix in ("", "/{run}"):
        _add_routes(app, prefix, Depends(model_of))
    return app


def _add_routes(app: FastAPI, prefix: str, model_of: Any) -> None:
    @app.post(f"{prefix}/v1/chat/completions", response_model=None)
    async def chat(request: ChatRequest, model: Any = model_of) -> Response:
        return await _chat(request, model)

    @app.post(f"{prefix}/v1/completions", response_model=None)
    async def complete(request: CompletionRequest, model: Any = model_of) -> Response:
        return await _complete(request, model)

    @app.get(f"{prefix}/v1/models", response_model=None)
    async def models(model: Any = model_of) -> Response:
        card = {"id": model.model_name, "object": "model", "created": 0, "owned_by": "trinity"}
        card["max_model_len"] = model.model_config.max_model_len
        return JSONResponse({"object": "list", "data": [card]})

    @app.get(f"{prefix}/health", response_model=None)
    async def health(model: Any = model_of) -> Response:
        return JSONResponse({"status": "ok", "version": await model.model_version_async})

    @app.get(f"{prefix}/metrics", response_model=None)
    async def metrics(model: Any = model_of) -> Response:
        return PlainTextResponse(_prometheus(await model.engine_health()))


async def _chat(request: ChatRequest, model: "ModelWrapper") -> Response:
    _check_name(request, model)
    tools = None if request.tool_choice == "none" else request.tools
    try:
        replies = await model.replies(
            request.messages, tools, request.chat_template_kwargs, request.sampling(), is_api=True
        )
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error)) from error
    answer = responses.chat_completion(
        replies,
        model.chat_format,
        model.model_name,
        with_logprobs=request.logprobs,
        with_token_ids=request.return_token_ids,
    )
    return _answer(request, answer, responses.chat_chunks)


async def _complete(request: CompletionRequest, model: "ModelWrapper") -> Response:
    _check_name(request, model)
    outcome = []
    try:
        for prompt in request.prompts():
            found = await model.continuations(prompt, request.sampling(), is_api=True)
            outcome += [(experience, done) for experience, done in found if done is not None]
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error)) from error
    answer = responses.text_completion(
        outcome,
        model.chat_format,
        model.model_name,
        with_logprobs=request.logprobs is not None,
        with_token_ids=request.return_token_ids,
    )
    return _answer(request, answer, responses.text_chunks)


def _answer(
    request: SamplingRequest, answer: responses.Json, chunks: Callable[..., Iterator[str]]
) -> Response:
    if not request.stream:
        return JSONResponse(answer)
    with_usage = bool(request.stream_options and request.stream_options.include_usage)
    events = chunks(answer, with_usage=with_usage)
    return StreamingResponse(events, media_type="text/event-stream")


def _check_key(request: Request, api_key: str | None) -> None:
    given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    if api_key is not None and not compare_digest(given.encode(), api_key.encode()):
        raise ApiError(401, "The API key is missing or wrong.", "authentication_error")


def _check_name(request: SamplingRequest, model: "ModelWrapper") -> None:
    if request.model and request.model not in (model.model_name, model.model_path):
        raise ApiError(
            404, f"The model {request.model!r} is not served here, but {model.model_name!r} is."
        )


def _prometheus(figures: dict[str, float]) -> str:
    lines = []
    for name, value in figures.items():
        lines += [f"# TYPE trinity_engine_{name} gauge", f"trinity_engine_{name} {value:g}"]
    return "\n".join(lines) + "\n"


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(responses.error(str(error), error.kind), error.status)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()]
    return JSONResponse(responses.error("; ".join(problems)), 400)


async def _other_error(request: Request, error: Exception) -> Response:
    message = f"{type(error).__name__}: {error}"
    return JSONResponse(responses.error(message, "server_error"), 500)
