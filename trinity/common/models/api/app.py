"""The HTTP routes over models: chat, completions, models, health, metrics."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from secrets import compare_digest
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from trinity.common.experience import Experience
from trinity.common.models.api import responses
from trinity.common.models.api.adapters import add_adapter_routes, named_model
from trinity.common.models.api.errors import CONTEXT_LENGTH_EXCEEDED, ApiError
from trinity.common.models.api.live import LiveTokens, StreamForm, events
from trinity.common.models.api.requests import ChatRequest, CompletionRequest, SamplingRequest
from trinity.common.models.endpoint import PromptTooLongError
from trinity.common.models.protocol import Completion
from trinity.common.models.replies import ChatReply
from trinity.common.models.streaming import sure_text
from trinity.common.models.transcript import Conversation

if TYPE_CHECKING:
    from trinity.common.models.wrapper import ModelWrapper

T = TypeVar("T")
FindModel = Callable[[str], "ModelWrapper | None"]
OnChat = Callable[[str, list[Experience]], None]


def create_app(
    find_model: FindModel, api_key: str | None, on_chat: OnChat | None = None
) -> FastAPI:
    """The routes.

    Args:
        find_model: From the first part of a path ("" if the path begins with ``/v1``) to the
            model behind it; None: there is none.
        api_key: What clients must send as bearer token; None: nothing.
        on_chat: Is told the id of every chat reply of the model itself, and the experiences of
            its choices; not of what an adapter beside it replies, which is not to be trained on.
    """
    app = FastAPI(title="trinity", openapi_url=None)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _other_error)

    def model_of(request: Request, run: str = "") -> "ModelWrapper":
        check_key(request, api_key)
        model = find_model(run)
        if model is None:
            raise ApiError(404, f"No run is called {run!r} here; it may have ended.")
        return model

    for prefix in ("", "/{run}"):
        _add_routes(app, prefix, Depends(model_of), on_chat)
    return app


def _add_routes(app: FastAPI, prefix: str, model_of: Any, on_chat: OnChat | None) -> None:
    @app.post(f"{prefix}/v1/chat/completions", response_model=None)
    async def chat(request: ChatRequest, model: Any = model_of) -> Response:
        return await _chat(request, model, on_chat)

    @app.post(f"{prefix}/v1/completions", response_model=None)
    async def complete(request: CompletionRequest, model: Any = model_of) -> Response:
        return await _complete(request, model)

    add_adapter_routes(app, prefix, model_of)

    @app.get(f"{prefix}/health", response_model=None)
    async def health(model: Any = model_of) -> Response:
        return JSONResponse({"status": "ok", "version": await model.model_version_async})

    @app.get(f"{prefix}/metrics", response_model=None)
    async def metrics(model: Any = model_of) -> Response:
        return PlainTextResponse(_prometheus(await model.endpoint.group.health()))


async def _chat(request: ChatRequest, whole: "ModelWrapper", on_chat: OnChat | None) -> Response:
    model = await named_model(request.model, whole)
    head = responses.stream_head("chatcmpl", model.model_name)
    tools = None if request.tool_choice == "none" else request.tools
    live = LiveTokens() if request.stream else None
    talk = Conversation(request.messages, tools, request.chat_template_kwargs or {})
    job = model.run.replies(talk, request.sampling(), is_api=True, listener=live)

    def answer(replies: list[ChatReply]) -> responses.Json:
        if on_chat is not None and model is whole:
            on_chat(head["id"], [reply.experience for reply in replies])
        told = responses.chat_completion(
            replies,
            model.endpoint.chat,
            model.model_name,
            with_logprobs=request.logprobs,
            with_token_ids=request.return_token_ids,
        )
        return told | {"id": head["id"]}

    if live is None:
        return JSONResponse(answer(await _or_refusal(job)))
    settings = model.model_config
    shown = partial(
        sure_text,
        stops=request.stops(),
        may_call=bool(tools) and settings.enable_auto_tool_choice,
        may_reason=bool(settings.reasoning_parser),
    )
    form = StreamForm(head, responses.chat_begin, responses.chat_chunks, begins_empty=True)
    return await _stream(request, model, live, job, answer, shown, form)


async def _complete(request: CompletionRequest, whole: "ModelWrapper") -> Response:
    model = await named_model(request.model, whole)
    live = LiveTokens() if request.stream else None

    async def outcome() -> list[tuple[Experience, Completion]]:
        done: list[tuple[Experience, Completion]] = []
        for place, prompt in enumerate(request.prompt):
            listener = live.shifted(place * request.n) if live else None
            found = await model.run.continuations(
                prompt, request.sampling(), is_api=True, listener=listener
            )
            done += [(experience, completion) for experience, completion in found if completion]
        return done

    def answer(found: list[tuple[Experience, Completion]]) -> responses.Json:
        return responses.text_completion(
            found,
            model.endpoint.chat,
            model.model_name,
            with_logprobs=request.logprobs is not None,
            with_token_ids=request.return_token_ids,
        )

    if live is None:
        return JSONResponse(answer(await _or_refusal(outcome())))
    shown = partial(sure_text, stops=request.stops(), may_call=False, may_reason=False)
    head = responses.stream_head("cmpl", model.model_name)
    form = StreamForm(head, responses.text_begin, responses.text_chunks, begins_empty=False)
    return await _stream(request, model, live, outcome(), answer, shown, form)


async def _stream(
    request: SamplingRequest,
    model: "ModelWrapper",
    live: LiveTokens,
    job: Coroutine[object, object, T],
    answer: Callable[[T], responses.Json],
    shown: Callable[[str], str],
    form: StreamForm,
) -> Response:
    """Events as the tokens come. What is wrong with a request is told before the first."""
    task = asyncio.ensure_future(job)
    await live.news(task)
    if task.done():
        await _or_refusal(task)
    with_usage = bool(request.stream_options and request.stream_options.include_usage)
    form.with_usage = with_usage

    def text_of(tokens: list[int]) -> str:
        return shown(model.endpoint.chat.decode(tokens, skip_special_tokens=True))

    found = events(live, task, answer, text_of, form)
    return StreamingResponse(found, media_type="text/event-stream")


async def _or_refusal(job: Awaitable[T]) -> T:
    """What ``job`` gives; the caller's mistakes as an answer that says so."""
    try:
        return await job
    except PromptTooLongError as error:
        raise ApiError(400, str(error), code=CONTEXT_LENGTH_EXCEEDED) from error
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error)) from error


def check_key(request: Request, api_key: str | None) -> None:
    """Refuse a request that does not bring ``api_key``."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    if api_key is not None and not compare_digest(given.encode(), api_key.encode()):
        raise ApiError(401, "The API key is missing or wrong.", "authentication_error")


def _prometheus(figures: dict[str, float]) -> str:
    lines = []
    for name, value in figures.items():
        lines += [f"# TYPE trinity_engine_{name} gauge", f"trinity_engine_{name} {value:g}"]
    return "\n".join(lines) + "\n"


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(responses.error(str(error), error.kind, error.code), error.status)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return JSONResponse(responses.error("; ".join(map(_told, error.errors()))), 400)


def _told(problem: Mapping[str, Any]) -> str:
    """One of pydantic's errors: where, and what."""
    place = ".".join(map(str, problem["loc"][1:])) or "the request"
    return f"{place}: {problem['msg'].removeprefix('Value error, ')}"


async def _other_error(request: Request, error: Exception) -> Response:
    message = f"{type(error).__name__}: {error}"
    return JSONResponse(responses.error(message, "server_error"), 500)
