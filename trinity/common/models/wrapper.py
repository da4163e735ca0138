"""`ModelWrapper`: a model as workflows see it. Text and messages in, experiences out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from trinity.common.experience import Experience
from trinity.common.models.chat import ChatFormat
from trinity.common.models.engines import EngineGroup
from trinity.common.models.masking import mask_messages
from trinity.common.models.messages import Messages, Tools, content_text
from trinity.common.models.protocol import (
    Completion,
    InferenceEngine,
    NamedAdapter,
    TextEngine,
)
from trinity.common.models.replies import (
    MASKED_TEXT,
    ChatReply,
    experience_of,
    experience_of_row,
    masked_experience,
    text_experience,
)
from trinity.common.models.reply_parsers import ParsedReply, parse_reply
from trinity.common.models.sampling import default_sampling, request_seed, sampling_params
from trinity.common.models.settings import ModelSettings
from trinity.common.models.streaming import Listener, sampled
from trinity.common.models.transcript import Prompt, Reply, TokenRow, Transcript
from trinity.common.models.vision import PIXELS, images_in
from trinity.utils.threads import run_sync

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

TemplateArgs = Mapping[str, Any] | None


class ModelWrapper:
    """One model, served by one or more engines.

    Every method that waits has an ``_async`` twin; a workflow that is not async calls the plain
    one. A run gets its own clone (`clone_with_isolated_history`), so that state and history of
    concurrent runs stay apart.

    Args:
        engines: Engines that serve the same weights; a request goes to the least loaded one.
        tokenizer: None: loaded from ``settings.model_path`` when first needed.
        seed: Seed of requests before `begin_run`.
    """

    def __init__(
        self,
        engines: InferenceEngine | Sequence[InferenceEngine],
        settings: ModelSettings,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self._group = EngineGroup(engines)
        self._settings = settings
        self._chat = ChatFormat(settings, tokenizer)
        self._seed = seed
        self._num_calls = 0
        self._state: dict[str, Any] = {}
        self._history: list[Experience] = []
        self._transcript = Transcript(self._chat)
        self._adapter: str | None = None
        self._through: dict[str, ModelWrapper] = {}

    def clone_with_isolated_history(self) -> ModelWrapper:
        """The same model for another run: engines and tokenizer shared, state and history new."""
        clone = ModelWrapper([], self._settings, seed=self._seed)
        clone._group, clone._adapter = self._group, self._adapter
        clone._chat = self._chat
        clone._transcript = Transcript(self._chat)
        return clone

    def with_adapter(self, name: str) -> ModelWrapper:
        """The same model and run through the adapter ``name`` of its engines.

        It is not what is trained: nothing that it replies is recorded.
        """
        if name not in self._through:
            model = self.clone_with_isolated_history()
            model._adapter = name
            model._settings = replace(self._settings, name=name, adapter=name, enable_history=False)
            self._through[name] = model
        return self._through[name]

    def begin_run(self, seed: int) -> None:
        """Start a run: call i of it samples with a seed made of (``seed``, i) alone."""
        self._seed, self._num_calls = seed, 0
        self._state, self._history, self._through = {}, [], {}
        self._transcript = Transcript(self._chat)

    @property
    def run_seed(self) -> int:
        """The seed of the run under way."""
        return self._seed

    # Sampling

    async def chat_async(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        chat_template_kwargs: TemplateArgs = None,
        **sampling: Any,
    ) -> list[Experience]:
        """``n`` replies to a conversation.

        A conversation that goes on from replies of this run goes on from their very tokens.

        Args:
            messages: In the OpenAI form. A last message of the assistant is continued.
            tools: Handed to the chat template.
            chat_template_kwargs: More variables for the template.
            sampling: Fields of `SamplingParams`; the rest is as the model's settings say.
        """
        replies = await self.replies(messages, tools, chat_template_kwargs, sampling)
        return [reply.experience for reply in replies]

    def chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        chat_template_kwargs: TemplateArgs = None,
        **sampling: Any,
    ) -> list[Experience]:
        """`chat_async` for a workflow that is not async."""
        job = self.chat_async(
            messages, tools=tools, chat_template_kwargs=chat_template_kwargs, **sampling
        )
        return run_sync(job)

    async def generate_async(
        self, prompts: str | Sequence[str], **sampling: Any
    ) -> list[Experience]:
        """``n`` continuations of each text, those of the first text first."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        groups = await asyncio.gather(*[self.continuations(text, sampling) for text in texts])
        return [experience for group in groups for experience, _ in group]

    def generate(self, prompts: str | Sequence[str], **sampling: Any) -> list[Experience]:
        """`generate_async` for a workflow that is not async."""
        return run_sync(self.generate_async(prompts, **sampling))

    async def logprobs_async(
        self, tokens: Sequence[int] | Tensor, temperature: float | None = None
    ) -> Tensor:
        """[len(tokens) - 1] log-probability of each token given those before it."""
        ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        return torch.tensor(await self._token_logprobs(ids, temperature), dtype=torch.float32)

    def logprobs(self, tokens: Sequence[int] | Tensor, temperature: float | None = None) -> Tensor:
        """`logprobs_async` for a workflow that is not async."""
        return run_sync(self.logprobs_async(tokens, temperature))

    async def convert_messages_to_experience_async(
        self,
        messages: Messages,
        tools: Tools | None = None,
        temperature: float | None = None,
    ) -> Experience:
        """A conversation as one experience in which all assistant turns are trained on.

        What follows the last assistant turn is left out. Turns sampled in this run keep their
        tokens and logprobs; a conversation with other turns is encoded as a whole and its
        logprobs are computed. One that is longer than ``max_model_len`` - 1 is cut there and
        marked ``response_truncated``.

        Raises:
            ValueError: There is no assistant turn, or the chat template hides one.
        """
        talk = _until_last_reply(messages)
        row = self._transcript.known_row(talk, tools)
        was_sampled = row is not None
        if row is None:
            row = await self._scored_row(talk, tools, temperature)
        longest = self._settings.max_model_len
        experience = experience_of_row(self._chat, row, None if longest is None else longest - 1)
        experience.multi_modal_inputs = _media(self._pixels(talk, row.ids))
        heat = self._settings.temperature if temperature is None else temperature
        if heat:
            experience.info["temperature"] = heat
        experience.metrics["token_fork"] = float(not was_sampled)
        return experience

    def convert_messages_to_experience(
        self,
        messages: Messages,
        tools: Tools | None = None,
        temperature: float | None = None,
    ) -> Experience:
        """`convert_messages_to_experience_async` for a workflow that is not async."""
        return run_sync(self.convert_messages_to_experience_async(messages, tools, temperature))

    # As an API

    def get_openai_client(self) -> OpenAI:
        """An OpenAI client of this run, for code that is not async.

        Its requests stay in this process. With ``enable_history`` every reply is recorded.
        """
        self._require_api()
        from trinity.common.models.api.clients import openai_client

        return openai_client(self)

    def get_openai_async_client(self) -> AsyncOpenAI:
        """Like `get_openai_client`, for async code."""
        self._require_api()
        from trinity.common.models.api.clients import openai_async_client

        return openai_async_client(self)

    @property
    def api_address(self) -> str:
        """Where this run's OpenAI API is, without ``/v1``: for programs that want an address.

        It answers as long as this wrapper lives. Asking for it starts a server on loopback.
        """
        return self._api[0]

    @property
    def api_key(self) -> str:
        """What the API at `api_address` wants as key."""
        return self._api[1]

    @cached_property
    def _api(self) -> tuple[str, str]:
        self._require_api()
        from trinity.common.models.api.server import serve_model

        return serve_model(self)

    def _require_api(self) -> None:
        if not self._settings.enable_openai_api:
            raise ValueError(
                "enable_openai_api is false, so there is no OpenAI client: set "
                "explorer.rollout_model.enable_openai_api to true."
            )

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_api", None)
        return state

    # What the model is

    @property
    def model_path(self) -> str:
        return self._settings.model_path

    @property
    def model_name(self) -> str:
        return self._settings.name or self._settings.model_path

    @property
    def model_config(self) -> ModelSettings:
        return self._settings

    def get_lora_request(self) -> str | None:
        """Name of the adapter that the requests of this model go through; None without one."""
        return self._settings.adapter

    async def get_lora_request_async(self) -> str | None:
        """`get_lora_request` for async code."""
        return self.get_lora_request()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._chat.tokenizer

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """The sampling defaults, as `chat` takes them."""
        return default_sampling(self._settings)

    @property
    def model_version_async(self) -> Coroutine[Any, Any, int]:
        """Await it: version of the weights that sample now (the oldest among the engines)."""
        return self._group.version()

    @property
    def model_version(self) -> int:
        return run_sync(self._group.version())

    @property
    def token_counts(self) -> dict[str, int]:
        """Later turns of this run, and how many of them forked or would have drifted."""
        transcript = self._transcript
        return {
            "turns": transcript.num_turns,
            "forks": transcript.num_forks,
            "drifts": transcript.num_drifts,
        }

    async def get_message_token_len(self, messages: Messages) -> int:
        """Tokens of a conversation as a prompt."""
        return len(self._chat.encode(self._chat.render(messages)))

    def get_current_load(self) -> int:
        """Requests of this process that are under way."""
        return self._group.load

    # State of the run

    async def get_workflow_state(self) -> dict[str, Any]:
        """What `set_workflow_state` has put there."""
        return self._state

    async def set_workflow_state(self, state: dict[str, Any]) -> None:
        """Add to what the workflow wants to be known of this run."""
        self._state |= state

    async def clean_workflow_state(self) -> None:
        """Forget state and history."""
        self._state, self._history = {}, []

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """Every reply recorded in this run, in order.

        Raises:
            ValueError: ``enable_history`` is off.
        """
        if not self._settings.enable_history:
            raise ValueError(
                "enable_history is false, so nothing was recorded: set "
                "explorer.rollout_model.enable_history to true."
            )
        history = list(self._history)
        if clear_history:
            self._history.clear()
        return history

    # For the parts around it

    async def replies(
        self,
        messages: Messages,
        tools: Tools | None,
        template_args: TemplateArgs,
        sampling: Mapping[str, Any],
        *,
        is_api: bool = False,
        listener: Listener | None = None,
    ) -> list[ChatReply]:
        """`chat_async`, with all that an API tells of a reply.

        Args:
            is_api: Whether an API asks: of the limits only ``max_model_len`` holds there.
            listener: Is told the tokens so far while the engine works.
        """
        seed = self._next_seed()
        if not self._settings.gives_tokens:
            return await self._text_replies(messages, tools, sampling, seed)
        prompt = self._transcript.prompt(messages, tools, template_args)
        outcome = await self._continuations(
            prompt.row.ids,
            prompt.text,
            sampling,
            seed,
            is_api,
            listener,
            self._pixels(messages, prompt.row.ids),
        )
        return [
            self._reply(messages, tools, template_args, prompt, experience, completion)
            for experience, completion in outcome
        ]

    async def continuations(
        self,
        prompt: str | list[int],
        sampling: Mapping[str, Any],
        *,
        is_api: bool = False,
        listener: Listener | None = None,
    ) -> list[tuple[Experience, Completion | None]]:
        """Samples of a text or of token ids; no completion where that is too long."""
        ids = (
            self._chat.encode(prompt, add_special_tokens=True)
            if isinstance(prompt, str)
            else prompt
        )
        text = self._chat.decode(ids)
        seed = self._next_seed()
        return await self._continuations(ids, text, sampling, seed, is_api, listener)

    async def engine_health(self) -> dict[str, float]:
        """Figures of all engines: sums, but the least version."""
        return await self._group.health()

    async def adapters(self) -> list[NamedAdapter]:
        """Adapters that requests may name beside the model itself."""
        return await self._group.adapters() if self._settings.has_named_adapters else []

    async def load_adapter(self, adapter: NamedAdapter) -> None:
        """Have the engines serve one more; `ValueError` if they can't."""
        await self._group.load_adapter(adapter)

    async def unload_adapter(self, name: str) -> None:
        """Have the engines serve it no longer; `LookupError` if there is none of that name."""
        await self._group.unload_adapter(name)

    @property
    def chat_format(self) -> ChatFormat:
        return self._chat

    # Inside

    async def _continuations(
        self,
        prompt_ids: list[int],
        prompt_text: str,
        sampling: Mapping[str, Any],
        seed: int,
        is_api: bool = False,
        listener: Listener | None = None,
        pixels: Tensor | None = None,
    ) -> list[tuple[Experience, Completion | None]]:
        settings = self._settings.for_api() if is_api else self._settings
        params = sampling_params(settings, len(prompt_ids), sampling, seed)
        limit = settings.longest_prompt
        if limit is not None and len(prompt_ids) > limit:
            if not settings.enable_prompt_truncation:
                raise ValueError(_too_long(len(prompt_ids), limit))
            return [
                (masked_experience(self._chat, prompt_ids, limit), None) for _ in range(params.n)
            ]
        completions = await self._group.ask(
            lambda engine: sampled(engine, prompt_ids, params, listener, pixels, self._adapter)
        )
        experiences = [
            experience_of(self._chat, prompt_ids, prompt_text, completion, params)
            for completion in completions
        ]
        for experience in experiences:
            experience.multi_modal_inputs = _media(pixels)
        if self._settings.enable_history:
            self._history += experiences
        return list(zip(experiences, completions, strict=True))

    async def _text_replies(
        self, messages: Messages, tools: Tools | None, sampling: Mapping[str, Any], seed: int
    ) -> list[ChatReply]:
        """Replies of an engine that gives texts and no tokens."""
        params = sampling_params(self._settings, 0, sampling, seed)
        replies = await self._group.ask(
            lambda engine: cast(TextEngine, engine).chat(messages, tools, params)
        )
        prompt_text = "\n".join(
            f"{m.get('role')}: {content_text(m, lambda image: '<image>')}" for m in messages
        )
        outcome = []
        for reply in replies:
            experience = text_experience(prompt_text, reply, params)
            message = {**reply.message, "content": reply.text}
            outcome.append(
                ChatReply(experience, reply.text, ParsedReply(reply.text), message, None)
            )
        if self._settings.enable_history:
            self._history += [reply.experience for reply in outcome]
        return outcome

    def _reply(
        self,
        messages: Messages,
        tools: Tools | None,
        template_args: TemplateArgs,
        prompt: Prompt,
        experience: Experience,
        completion: Completion | None,
    ) -> ChatReply:
        if completion is None:
            message = {"role": "assistant", "content": MASKED_TEXT}
            return ChatReply(experience, MASKED_TEXT, ParsedReply(MASKED_TEXT), message, None)
        text = experience.response_text or ""
        parsed = self._parse(text, tools)
        message = _message(parsed, self._next_call_id)
        reply = Reply(
            messages=[{"role": "assistant", "content": text}, message],
            row=prompt.row.with_sampled(completion),
            prompt_text=prompt.text,
            shown=[parsed.reasoning or "", parsed.content],
            is_cut=text != self._chat.decode(completion.token_ids, skip_special_tokens=True),
        )
        self._transcript.record(messages, tools, template_args, reply)
        if prompt.goes_on:
            experience.metrics["token_fork"] = float(prompt.is_fork)
            experience.metrics["token_drift"] = float(prompt.has_drift)
        return ChatReply(experience, text, parsed, message, completion)

    def _parse(self, text: str, tools: Tools | None) -> ParsedReply:
        settings = self._settings
        wants_calls = bool(tools) and settings.enable_auto_tool_choice
        parser = (settings.tool_call_parser or "hermes") if wants_calls else None
        return parse_reply(text, parser, settings.reasoning_parser)

    async def _scored_row(
        self, messages: Messages, tools: Tools | None, temperature: float | None
    ) -> TokenRow:
        """A conversation encoded as a whole, with the logprobs of its assistant turns."""
        if self._chat.vision is not None and images_in(messages):
            raise ValueError("Of conversations with images only sampled ones become experiences.")
        ids, mask, _ = mask_messages(self._chat, messages, tools)
        longest = self._settings.max_model_len
        scored = ids if longest is None else ids[: longest - 1]
        version = await self._group.version()
        found = [0.0, *await self._token_logprobs(scored, temperature)]
        logprobs = [value if is_on else 0.0 for value, is_on in zip(found, mask, strict=False)]
        logprobs += [0.0] * (len(ids) - len(logprobs))
        return TokenRow(ids, mask, logprobs, [version if is_on else -1 for is_on in mask])

    async def _token_logprobs(self, ids: list[int], temperature: float | None) -> list[float]:
        heat = self._settings.temperature if temperature is None else temperature
        return await self._group.ask(lambda engine: engine.logprobs(ids, heat, self._adapter))

    def _pixels(self, messages: Messages, prompt_ids: Sequence[int]) -> Tensor | None:
        vision = self._chat.vision
        return None if vision is None else vision.pixels(messages, prompt_ids)

    def _next_seed(self) -> int:
        self._num_calls += 1
        return request_seed(self._seed, self._num_calls)

    def _next_call_id(self, place: int) -> str:
        return f"call_{request_seed(self._seed, self._num_calls):012x}_{place}"


def _media(pixels: Tensor | None) -> dict[str, Tensor] | None:
    return None if pixels is None else {PIXELS: pixels}


def _too_long(length: int, limit: int) -> str:
    return (
        f"The prompt has {length} tokens, more than {limit} (max_prompt_tokens and max_model_len). "
        "Raise them, or set enable_prompt_truncation to true to leave such prompts out of training."
    )


def _until_last_reply(messages: Messages) -> Messages:
    places = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not places:
        raise ValueError("The conversation has no assistant turn to learn from.")
    return messages[: places[-1] + 1]


def _message(parsed: ParsedReply, call_id: Callable[[int], str]) -> dict[str, Any]:
    """A reply as an OpenAI message."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": call_id(place),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(parsed.tool_calls)
        ]
    return message
