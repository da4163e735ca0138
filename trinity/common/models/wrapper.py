"""`ModelWrapper`: a model as workflows see it. Text and messages in, experiences out."""

import asyncio
import hashlib
from collections.abc import Coroutine, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trinity.common.experience import Experience
from trinity.common.models.chat import ChatFormat, Messages, Tools
from trinity.common.models.protocol import Completion, InferenceEngine, SamplingParams
from trinity.common.models.settings import ModelSettings
from trinity.utils.threads import run_sync

T = TypeVar("T")

MASKED_TEXT = "[This experience is masked out due to overlong prompt]"

_SAMPLING = {field.name for field in fields(SamplingParams)}


class ModelWrapper:
    """One model, served by one or more engines.

    Every method that waits has an ``_async`` twin; in a workflow that is not async, call the
    plain one. A run gets its own clone (`clone_with_isolated_history`), so that state and
    history of concurrent runs stay apart.

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
        self._engines = list(engines) if isinstance(engines, Sequence) else [engines]
        self._load = [0] * len(self._engines)
        self._settings = settings
        self._chat = ChatFormat(settings, tokenizer)
        self._seed = seed
        self._num_calls = 0
        self._state: dict[str, Any] = {}
        self._history: list[Experience] = []

    def clone_with_isolated_history(self) -> "ModelWrapper":
        """The same model for another run: engines and tokenizer shared, state and history new."""
        clone = ModelWrapper(self._engines, self._settings, seed=self._seed)
        clone._chat = self._chat
        clone._load = self._load
        return clone

    def begin_run(self, seed: int) -> None:
        """Start a run: call i of it samples with a seed made of (``seed``, i) alone."""
        self._seed, self._num_calls = seed, 0
        self._state, self._history = {}, []

    # Sampling

    async def chat_async(
        self, messages: Messages, *, tools: Tools | None = None, **sampling: Any
    ) -> list[Experience]:
        """``n`` replies to a conversation.

        Args:
            messages: In the OpenAI form. A last message of the assistant is continued.
            tools: Handed to the chat template.
            sampling: Fields of `SamplingParams`; the rest is as the model's settings say.
        """
        prompt_ids = self._chat.encode(self._chat.render(messages, tools))
        return await self._sample(prompt_ids, sampling, self._next_seed())

    def chat(
        self, messages: Messages, *, tools: Tools | None = None, **sampling: Any
    ) -> list[Experience]:
        """`chat_async` for a workflow that is not async."""
        return run_sync(self.chat_async(messages, tools=tools, **sampling))

    async def generate_async(
        self, prompts: str | Sequence[str], **sampling: Any
    ) -> list[Experience]:
        """``n`` continuations of each text, those of the first text first."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        jobs = [
            self._sample(
                self._chat.encode(text, add_special_tokens=True), sampling, self._next_seed()
            )
            for text in texts
        ]
        return [experience for group in await _together(jobs) for experience in group]

    def generate(self, prompts: str | Sequence[str], **sampling: Any) -> list[Experience]:
        """`generate_async` for a workflow that is not async."""
        return run_sync(self.generate_async(prompts, **sampling))

    async def logprobs_async(
        self, tokens: Sequence[int] | Tensor, temperature: float | None = None
    ) -> Tensor:
        """[len(tokens) - 1] log-probability of each token given those before it."""
        ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        heat = self._settings.temperature if temperature is None else temperature
        found = await self._on_engine(lambda engine: engine.logprobs(ids, heat))
        return torch.tensor(found, dtype=torch.float32)

    def logprobs(self, tokens: Sequence[int] | Tensor, temperature: float | None = None) -> Tensor:
        """`logprobs_async` for a workflow that is not async."""
        return run_sync(self.logprobs_async(tokens, temperature))

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

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._chat.tokenizer

    @property
    def generate_kwargs(self) -> dict[str, object]:
        """The sampling defaults, as `chat` takes them."""
        settings = self._settings
        return {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "repetition_penalty": settings.repetition_penalty,
            "max_tokens": settings.max_response_tokens,
            "min_tokens": settings.min_response_tokens,
            "ignore_eos": settings.ignore_eos,
        }

    @property
    def model_version_async(self) -> Coroutine[Any, Any, int]:
        """Await it: version of the weights that sample now (the oldest among the engines)."""
        return self._version()

    @property
    def model_version(self) -> int:
        return run_sync(self._version())

    async def get_message_token_len(self, messages: Messages) -> int:
        """Tokens of a conversation as a prompt."""
        return len(self._chat.encode(self._chat.render(messages)))

    def get_current_load(self) -> int:
        """Requests of this process that are under way."""
        return sum(self._load)

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
                "The history of a model is kept only with enable_history: true "
                "(explorer.rollout_model.enable_history)."
            )
        history = list(self._history)
        if clear_history:
            self._history.clear()
        return history

    # Inside

    async def _sample(
        self, prompt_ids: list[int], sampling: dict[str, Any], seed: int
    ) -> list[Experience]:
        params = self._params(len(prompt_ids), sampling, seed)
        limit = self._settings.longest_prompt
        if limit is not None and len(prompt_ids) > limit:
            return self._masked(prompt_ids, limit, params.n)
        completions = await self._on_engine(lambda engine: engine.sample(prompt_ids, params))
        prompt_text = self._chat.decode(prompt_ids)
        experiences = [
            self._experience(prompt_ids, prompt_text, completion, params)
            for completion in completions
        ]
        if self._settings.enable_history:
            self._history += experiences
        return experiences

    def _params(self, prompt_length: int, sampling: dict[str, Any], seed: int) -> SamplingParams:
        wanted: dict[str, Any] = {"seed": seed, **self.generate_kwargs}
        wanted |= {name: value for name, value in sampling.items() if value is not None}
        wanted.pop("logprobs", None)  # an experience has them always
        unknown = wanted.keys() - _SAMPLING
        if unknown:
            raise TypeError(
                f"Unknown sampling parameters {sorted(unknown)}; known: {sorted(_SAMPLING)}."
            )
        if isinstance(wanted.get("stop"), str):
            wanted["stop"] = (wanted["stop"],)
        for name in ("stop", "stop_token_ids"):
            wanted[name] = tuple(wanted.get(name) or ())
        if self._settings.max_model_len is not None:
            room = max(self._settings.max_model_len - prompt_length, 1)
            wanted["max_tokens"] = min(wanted["max_tokens"] or room, room)
        return SamplingParams(**wanted)

    def _masked(self, prompt_ids: list[int], limit: int, count: int) -> list[Experience]:
        """Stand-ins for replies to a prompt that is too long; they are never trained on.

        Raises:
            ValueError: Truncation is off.
        """
        if not self._settings.enable_prompt_truncation:
            raise ValueError(
                f"The prompt has {len(prompt_ids)} tokens, more than {limit} "
                "(max_prompt_tokens and max_model_len). Raise them, or set "
                "enable_prompt_truncation to leave such prompts out."
            )
        tokens = prompt_ids[: limit + 1]
        return [
            Experience(
                tokens=tokens,
                logprobs=[0.0],
                prompt_length=limit,
                reward=0.0,
                truncate_status="prompt_truncated",
                prompt_text=self._chat.decode(tokens[:limit]),
                response_text=MASKED_TEXT,
            )
            for _ in range(count)
        ]

    def _experience(
        self,
        prompt_ids: list[int],
        prompt_text: str,
        completion: Completion,
        params: SamplingParams,
    ) -> Experience:
        info: dict[str, object] = {"finish_reason": completion.finish_reason}
        if completion.versions:
            info["model_version"] = completion.versions[0]
            info["model_version_drift"] = completion.versions[-1] - completion.versions[0]
        if params.temperature:
            info["temperature"] = params.temperature
        return Experience(
            tokens=[*prompt_ids, *completion.token_ids],
            logprobs=completion.logprobs,
            token_versions=completion.versions or None,
            prompt_length=len(prompt_ids),
            prompt_text=prompt_text,
            response_text=self._response_text(completion, params),
            info=info,
        )

    def _response_text(self, completion: Completion, params: SamplingParams) -> str:
        text = self._chat.decode(completion.token_ids, skip_special_tokens=True)
        cuts = [text.find(stop) for stop in params.stop if stop in text]
        return text[: min(cuts)] if cuts else text

    def _next_seed(self) -> int:
        self._num_calls += 1
        digest = hashlib.blake2b(f"{self._seed}/{self._num_calls}".encode(), digest_size=6)
        return int.from_bytes(digest.digest(), "big")

    async def _version(self) -> int:
        return min(await _together([engine.version() for engine in self._engines]))

    async def _on_engine(self, request: Any) -> Any:
        """What ``request(engine)`` gives on the least loaded engine, or on the next that lives."""
        order = sorted(range(len(self._engines)), key=lambda place: self._load[place])
        for attempt, place in enumerate(order):
            self._load[place] += 1
            try:
                return await request(self._engines[place])
            except ConnectionError:
                if attempt + 1 == len(order):
                    raise
            finally:
                self._load[place] -= 1
        raise ValueError("This model has no engines.")


async def _together(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    return list(await asyncio.gather(*jobs))
