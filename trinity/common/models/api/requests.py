"""What a client may ask for: the OpenAI requests, and what vLLM's users send besides."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "seed",
    "repetition_penalty",
    "ignore_eos",
)


class StreamOptions(BaseModel):
    """``include_usage``: a last chunk tells the number of tokens."""

    include_usage: bool = False


class SamplingRequest(BaseModel):
    """What both kinds of request share. Fields that don't change the reply are let pass.

    Bounds of sampling are those of `SamplingParams`; ``n`` has one more, which guards a server.
    """

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: int = Field(1, le=1024)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    @field_validator("presence_penalty", "frequency_penalty", "logit_bias")
    @classmethod
    def _not_offered(cls, value: object) -> object:
        if value:
            raise ValueError("is not offered by this server; leave it out")
        return value

    def stops(self) -> list[str]:
        """The stop texts."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that were given."""
        return {name: getattr(self, name) for name in _SAMPLING}


class ChatRequest(SamplingRequest):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _only_the_token(cls, value: int | None) -> int | None:
        if value:
            raise ValueError("must be 0: the logprob of the sampled token is all there is")
        return value

    @field_validator("response_format")
    @classmethod
    def _only_text(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value and value.get("type", "text") != "text":
            raise ValueError(f"has type {value.get('type')!r}; only 'text' is offered")
        return value

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        return given


class CompletionRequest(SamplingRequest):
    """``POST /v1/completions``."""

    prompt: list[str | list[int]]
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        """One prompt as a list of one; one sentence for all that is no prompt."""
        several = value if isinstance(value, list) and not _are_ids(value) else [value]
        if not several or not all(isinstance(one, str) or _are_ids(one) for one in several):
            raise ValueError("must be a text, a list of token ids, or a list of such prompts")
        return several

    @field_validator("echo", "suffix")
    @classmethod
    def _not_offered_here(cls, value: object) -> object:
        if value:
            raise ValueError("is not offered by this server; leave it out")
        return value

    @field_validator("logprobs")
    @classmethod
    def _only_the_token(cls, value: int | None) -> int | None:
        if value and value > 1:
            raise ValueError("must be at most 1: the logprob of the sampled token is all there is")
        return value


def _are_ids(value: object) -> bool:
    """Whether it is a list of numbers that may be tokens."""
    if not isinstance(value, list) or not value:
        return False
    return all(type(one) is int and 0 <= one < 2**31 for one in value)
