"""`OpenAIEngine`: replies from an outside service. It gives texts, no tokens: not to train on."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from trinity.common.errors import TrinityError
from trinity.common.models.messages import Messages, Tools
from trinity.common.models.protocol import (
    Completion,
    FinishReason,
    SamplingParams,
    TextReply,
    WeightTicket,
)
from trinity.engine.openai.pacing import Pacer, wait_before_retry
from trinity.engine.openai.settings import OpenAIEngineSettings
from trinity.utils.refusal import reason_of

_MOST_CHARACTERS = 300  # of an answer that may be a page
_NO_TOKENS = (
    "The model {model!r} is behind an outside service, which gives texts but no token ids: it can "
    "be asked and compared (mode bench, auxiliary models), not trained or scored."
)


class ServiceError(TrinityError):
    """An outside service refused a request, or could not be reached."""


class OpenAIEngine:
    """A model of an OpenAI-compatible service.

    Args:
        transport: Carries the requests; None: the network.
    """

    def __init__(
        self,
        settings: OpenAIEngineSettings,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._settings = settings
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._pacer: Pacer | None = None
        self._running = 0
        self._num_tokens = 0
        self._num_retries = 0

    async def prepare(self) -> None:
        """Find address and key, and ask the service for its models.

        Raises:
            ServiceError: A variable is not set, the key is refused, or nobody answers.
        """
        settings = self._settings
        address, key = _variable(settings.base_url_env), _variable(settings.api_key_env)
        self._client = httpx.AsyncClient(
            base_url=address.rstrip("/"),
            headers={"Authorization": f"Bearer {key}"},
            timeout=settings.timeout_s,
            transport=self._transport,
        )
        self._pacer = Pacer(settings.max_concurrent, settings.max_requests_per_minute)
        found = await self._request("GET", "/models", None)
        if found.status_code in (401, 403):
            raise ServiceError(
                f"The service at {settings.base_url_env} refuses the key in "
                f"{settings.api_key_env} (status {found.status_code})."
            )

    async def chat(
        self, messages: Messages, tools: Tools | None, params: SamplingParams
    ) -> list[TextReply]:
        """``params.n`` replies to a conversation.

        Raises:
            ServiceError: The service refuses the request, or fails it at every try.
        """
        replies: list[TextReply] = []
        while left := params.n - len(replies):  # some services give one, whatever is asked for
            seed = None if params.seed is None else params.seed + len(replies)
            asked = replace(params, n=left, seed=seed)
            replies += (await self._replies(messages, tools, asked))[:left]
        return replies

    async def _replies(
        self, messages: Messages, tools: Tools | None, params: SamplingParams
    ) -> list[TextReply]:
        """One or more replies, ``params.n`` of a service that does as it is asked."""
        body = {
            "model": self._settings.model,
            "messages": [dict(message) for message in messages],
            **_sampling(params),
        }
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        found = await self._request("POST", "/chat/completions", body)
        if found.status_code != httpx.codes.OK:
            raise ServiceError(f"The service answers {found.status_code}: {_reason(found)}")
        try:
            answer = found.json()
            replies = [_reply(choice) for choice in answer["choices"]]
        except (ValueError, LookupError, TypeError):
            replies = []
        if not replies:
            raise ServiceError(f"The service answers with no reply: {_reason(found)}")
        usage = answer.get("usage") or {}
        self._num_tokens += usage.get("completion_tokens", 0)
        return replies

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str | None = None
    ) -> list[Completion]:
        """Refused: there are no tokens."""
        raise ServiceError(_NO_TOKENS.format(model=self._settings.model))

    async def logprobs(
        self, token_ids: Sequence[int], temperature: float = 1.0, adapter: str | None = None
    ) -> list[float]:
        """Refused: there are no tokens."""
        raise ServiceError(_NO_TOKENS.format(model=self._settings.model))

    async def load_weights(self, ticket: WeightTicket) -> str:
        """Refused: the weights are not ours."""
        raise ServiceError(_NO_TOKENS.format(model=self._settings.model))

    async def pause(self) -> None:
        """Nothing of ours runs there."""

    async def resume(self) -> None:
        """Nothing of ours runs there."""

    async def partial(self, request_id: str) -> list[list[int]]:
        """Nothing: replies come whole, as text."""
        return []

    async def version(self) -> int:
        """Always 0."""
        return 0

    async def health(self) -> dict[str, float]:
        """Requests under way, tokens so far, tries beyond the first."""
        return {
            "running": self._running,
            "waiting": 0,
            "tokens": self._num_tokens,
            "retries": self._num_retries,
        }

    async def close(self) -> None:
        """End the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> httpx.Response:
        """The answer to a request, tried again while the service is busy or out of reach."""
        if self._client is None or self._pacer is None:
            raise RuntimeError("The engine is not ready: await prepare() first.")
        problem = ""
        for attempt in range(self._settings.max_retries + 1):
            headers: Mapping[str, str] = {}
            try:
                async with self._pacer:
                    self._running += 1
                    try:
                        found = await self._client.request(method, path, json=body)
                    finally:
                        self._running -= 1
                if not _may_pass(found.status_code):
                    return found
                problem, headers = f"{found.status_code}: {_reason(found)}", found.headers
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt < self._settings.max_retries:
                self._num_retries += 1
                await asyncio.sleep(
                    wait_before_retry(attempt, self._settings.first_wait_s, headers)
                )
        raise ServiceError(
            f"The service at {self._settings.base_url_env} did not answer in "
            f"{self._settings.max_retries + 1} tries; the last one: {problem}"
        )


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ServiceError(
            f"The environment variable {name} is not set: an outside model needs it."
        )
    return value


def _may_pass(status: int) -> bool:
    """Whether another try may have another outcome."""
    return status in (408, 409, 429) or status >= 500


def _sampling(params: SamplingParams) -> dict[str, Any]:
    body: dict[str, Any] = {
        "n": params.n,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "max_tokens": params.max_tokens,
        "stop": list(params.stop) or None,
        "seed": params.seed,
    }
    return {name: value for name, value in body.items() if value is not None}


def _reply(choice: Mapping[str, Any]) -> TextReply:
    message = dict(choice["message"])
    reason: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
    return TextReply(message.get("content") or "", message, reason)


def _reason(response: httpx.Response) -> str:
    return reason_of(response.text)[:_MOST_CHARACTERS]
