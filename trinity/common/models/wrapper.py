"""`ModelWrapper`: a model as workflows see it. Text and messages in, experiences out.

It only shows what others do: `ModelRun` what belongs to one run, `Endpoint` what asks the engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trinity.common.experience import Experience
from trinity.common.models.chat import ChatFormat
from trinity.common.models.endpoint import Endpoint
from trinity.common.models.engines import EngineGroup
from trinity.common.models.messages import Messages, Tools
from trinity.common.models.protocol import InferenceEngine, NamedAdapter
from trinity.common.models.run import ModelRun
from trinity.common.models.sampling import default_sampling
from trinity.common.models.settings import ModelSettings
from trinity.common.models.transcript import Conversation
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
        self.endpoint = Endpoint(EngineGroup(engines), ChatFormat(settings, tokenizer), settings)
        """What the runs share."""
        self.begin_run(seed)

    def begin_run(self, seed: int) -> None:
        """Start a run: call i of it samples with a seed made of (``seed``, i) alone."""
        self.run = ModelRun(self.endpoint, seed)
        """The run under way."""
        self._through: dict[str, ModelWrapper] = {}

    def clone_with_isolated_history(self) -> ModelWrapper:
        """The same model for another run: engines and tokenizer shared, state and history new."""
        return self._at(self.endpoint)

    def with_adapter(self, name: str) -> ModelWrapper:
        """The same model and run through the adapter ``name`` of its engines.

        It is not what is trained: nothing that it replies is recorded.
        """
        if name not in self._through:
            self._through[name] = self._at(self.endpoint.through(name))
        return self._through[name]

    def _at(self, endpoint: Endpoint) -> ModelWrapper:
        model = copy(self)
        model.endpoint = endpoint
        model.begin_run(self.run.seed)
        return model

    @property
    def run_seed(self) -> int:
        """The seed of the run under way."""
        return self.run.seed

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
        conversation = Conversation(messages, tools, chat_template_kwargs or {})
        replies = await self.run.replies(conversation, sampling)
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
        groups = await asyncio.gather(*[self.run.continuations(text, sampling) for text in texts])
        return [experience for group in groups for experience, _ in group]

    def generate(self, prompts: str | Sequence[str], **sampling: Any) -> list[Experience]:
        """`generate_async` for a workflow that is not async."""
        return run_sync(self.generate_async(prompts, **sampling))

    async def logprobs_async(
        self, tokens: Sequence[int] | Tensor, temperature: float | None = None
    ) -> Tensor:
        """[len(tokens) - 1] log-probability of each token given those before it."""
        ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        return torch.tensor(
            await self.endpoint.token_logprobs(ids, temperature), dtype=torch.float32
        )

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
        tokens and logprobs; of a conversation that forked (``token_fork``) those since then are
        trained on. One that does not end in a sampled turn is encoded as a whole and its logprobs
        are computed. One that is longer than ``max_model_len`` - 1 is cut there and
        marked ``response_truncated``.

        Args:
            temperature: Of the logprobs that are computed; None: as the settings say.

        Raises:
            ValueError: There is no assistant turn, the chat template hides one, or turns were
                sampled at several temperatures.
        """
        return await self.run.experience(messages, tools, temperature)

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
        if not self.endpoint.settings.enable_openai_api:
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
        return self.endpoint.settings.model_path

    @property
    def model_name(self) -> str:
        return self.endpoint.settings.name or self.endpoint.settings.model_path

    @property
    def model_config(self) -> ModelSettings:
        return self.endpoint.settings

    def get_lora_request(self) -> str | None:
        """Name of the adapter that the requests of this model go through; None without one."""
        return self.endpoint.settings.adapter

    async def get_lora_request_async(self) -> str | None:
        """`get_lora_request` for async code."""
        return self.get_lora_request()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.endpoint.chat.tokenizer

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """The sampling defaults, as `chat` takes them."""
        return default_sampling(self.endpoint.settings)

    @property
    def model_version_async(self) -> Coroutine[Any, Any, int]:
        """Await it: version of the weights that sample now (the oldest among the engines)."""
        return self.endpoint.group.version()

    @property
    def model_version(self) -> int:
        return run_sync(self.endpoint.group.version())

    @property
    def token_counts(self) -> dict[str, int]:
        """Later turns of this run, and how many of them forked or would have drifted."""
        transcript = self.run.transcript
        return {
            "turns": transcript.num_turns,
            "forks": transcript.num_forks,
            "drifts": transcript.num_drifts,
        }

    async def adapters(self) -> list[NamedAdapter]:
        """Adapters that requests may name beside the model itself."""
        if not self.endpoint.settings.has_named_adapters:
            return []
        return await self.endpoint.group.adapters()

    async def get_message_token_len(self, messages: Messages) -> int:
        """Tokens of a conversation as a prompt."""
        return len(self.endpoint.chat.encode(self.endpoint.chat.render(messages)))

    def get_current_load(self) -> int:
        """Requests of this process that are under way."""
        return self.endpoint.group.load

    # State of the run

    async def get_workflow_state(self) -> dict[str, Any]:
        """What `set_workflow_state` has put there."""
        return self.run.state

    async def set_workflow_state(self, state: dict[str, Any]) -> None:
        """Add to what the workflow wants to be known of this run."""
        self.run.state |= state

    async def clean_workflow_state(self) -> None:
        """Forget state and history."""
        self.run.state, self.run.history = {}, []

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """Every reply recorded in this run, in order.

        Raises:
            ValueError: ``enable_history`` is off.
        """
        if not self.endpoint.settings.enable_history:
            raise ValueError(
                "enable_history is false, so nothing was recorded: set "
                "explorer.rollout_model.enable_history to true."
            )
        history = list(self.run.history)
        if clear_history:
            self.run.history.clear()
        return history
