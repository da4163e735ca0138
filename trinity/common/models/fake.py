"""Stand-ins for tests: `FakeModel` replies with given texts, `FakeEngine` with given tokens."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from trinity.common.errors import NotSetUpError
from trinity.common.experience import Experience
from trinity.common.models.messages import Messages, Tools, content_text
from trinity.common.models.protocol import Completion, SamplingParams, WeightTicket
from trinity.common.models.settings import ModelSettings
from trinity.utils.threads import run_sync

_NO_CLIENT = (
    "A scripted model has no OpenAI client, which this workflow asks for. Try it on a real model, "
    "without --fake."
)

Script = Sequence[str] | Callable[[Messages], str]


class FakeModel:
    """Has the face of `ModelWrapper`; each sample is the next of the replies it was given.

    Tokens are the bytes of the texts. ``calls`` keeps the messages of every call.

    Args:
        replies: Texts, used one after the other, or a function from messages to a text.
    """

    def __init__(self, replies: Script, *, version: int = 0, name: str = "fake") -> None:
        self._replies = replies if callable(replies) else iter(list(replies))
        self._version = version
        self._settings = ModelSettings(model_path=name, name=name, enable_history=True)
        self._history: list[Experience] = []
        self._state: dict[str, Any] = {}
        self.calls: list[Messages] = []
        self.sampling: list[dict[str, Any]] = []
        self.seeds: list[int] = []

    model_path = property(lambda self: self._settings.model_path)
    model_name = property(lambda self: self._settings.name)
    model_config = property(lambda self: self._settings)
    model_version = property(lambda self: self._version)
    model_version_async = property(lambda self: asyncio.sleep(0, self._version))

    def clone_with_isolated_history(self) -> "FakeModel":
        """Shares replies and record of calls; has a history of its own."""
        clone = FakeModel([], version=self._version, name=self._settings.name)
        clone._replies = self._replies
        clone.calls, clone.sampling, clone.seeds = self.calls, self.sampling, self.seeds
        return clone

    def begin_run(self, seed: int) -> None:
        self.seeds.append(seed)
        self._history, self._state = [], {}

    async def chat_async(
        self, messages: Messages, *, tools: Tools | None = None, n: int = 1, **sampling: Any
    ) -> list[Experience]:
        """The next ``n`` replies."""
        self.calls.append(list(messages))
        self.sampling.append({"n": n, **sampling})
        prompt = "\n".join(f"{m.get('role')}: {content_text(m, _show)}" for m in messages) + "\n"
        experiences = [self._experience(prompt, self._next(messages)) for _ in range(n)]
        self._history += experiences
        return experiences

    def chat(
        self, messages: Messages, *, tools: Tools | None = None, n: int = 1, **sampling: Any
    ) -> list[Experience]:
        return run_sync(self.chat_async(messages, tools=tools, n=n, **sampling))

    async def generate_async(
        self, prompts: str | Sequence[str], n: int = 1, **sampling: Any
    ) -> list[Experience]:
        """The next ``n`` replies to each text."""
        texts = [prompts] if isinstance(prompts, str) else prompts
        asked: list[Messages] = [[{"role": "user", "content": text}] for text in texts]
        groups = [await self.chat_async(messages, n=n, **sampling) for messages in asked]
        return [experience for group in groups for experience in group]

    def generate(
        self, prompts: str | Sequence[str], n: int = 1, **sampling: Any
    ) -> list[Experience]:
        return run_sync(self.generate_async(prompts, n=n, **sampling))

    async def logprobs_async(
        self, tokens: Sequence[int] | Tensor, temperature: float | None = None
    ) -> Tensor:
        """-1 for every token."""
        return torch.full((len(tokens) - 1,), -1.0)

    def logprobs(self, tokens: Sequence[int] | Tensor, temperature: float | None = None) -> Tensor:
        return run_sync(self.logprobs_async(tokens, temperature))

    async def convert_messages_to_experience_async(
        self, messages: Messages, tools: Tools | None = None, temperature: float | None = None
    ) -> Experience:
        """All texts in a row; those of the assistant are trained on."""
        ids: list[int] = []
        mask: list[bool] = []
        for message in messages:
            turn = list(f"{content_text(message)}\n".encode())
            ids += turn
            mask += [message.get("role") == "assistant"] * len(turn)
        first = mask.index(True)
        return Experience(
            tokens=ids,
            prompt_length=first,
            action_mask=mask[first:],
            logprobs=[-1.0] * (len(ids) - first),
            response_text=bytes(ids[first:]).decode(),
            prompt_text=bytes(ids[:first]).decode(),
            info={"model_version": self._version},
        )

    def convert_messages_to_experience(
        self, messages: Messages, tools: Tools | None = None, temperature: float | None = None
    ) -> Experience:
        return run_sync(self.convert_messages_to_experience_async(messages, tools, temperature))

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        history = list(self._history)
        if clear_history:
            self._history.clear()
        return history

    async def get_workflow_state(self) -> dict[str, Any]:
        return self._state

    async def set_workflow_state(self, state: dict[str, Any]) -> None:
        self._state |= state

    async def clean_workflow_state(self) -> None:
        self._state, self._history = {}, []

    def get_openai_client(self) -> NoReturn:
        raise NotSetUpError(_NO_CLIENT)

    def get_openai_async_client(self) -> NoReturn:
        raise NotSetUpError(_NO_CLIENT)

    @property
    def api_address(self) -> NoReturn:
        raise NotSetUpError(_NO_CLIENT)

    def _next(self, messages: Messages) -> str:
        if callable(self._replies):
            return self._replies(messages)
        return next(self._replies)

    def _experience(self, prompt: str, reply: str) -> Experience:
        prompt_ids, ids = list(prompt.encode()), [*reply.encode(), 10]
        return Experience(
            tokens=[*prompt_ids, *ids],
            prompt_length=len(prompt_ids),
            logprobs=[-1.0] * len(ids),
            token_versions=[self._version] * len(ids),
            prompt_text=prompt,
            response_text=reply,
            info={"model_version": self._version},
        )


def _show(image: object) -> str:
    return "<image>"


class FakeEngine:
    """An `InferenceEngine` without a model: sample i of each request is the next of ``replies``.

    Args:
        replies: Token ids of the samples, one after the other.
        end_ids: A sample that ends with one of these stopped, others ran out of length.
    """

    def __init__(self, replies: Sequence[Sequence[int]], end_ids: Sequence[int] = ()) -> None:
        self._replies = iter([list(reply) for reply in replies])
        self._end_ids = set(end_ids)
        self._version = 0
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.tickets: list[WeightTicket] = []

    async def prepare(self) -> None:
        """Nothing to load."""

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str | None = None
    ) -> list[Completion]:
        self.prompts.append(list(prompt_ids))
        self.params.append(params)
        return [self._completion(next(self._replies)) for _ in range(params.n)]

    async def partial(self, request_id: str) -> list[list[int]]:
        return []

    async def logprobs(
        self, token_ids: Sequence[int], temperature: float = 1.0, adapter: str | None = None
    ) -> list[float]:
        return [-2.0] * (len(token_ids) - 1)

    async def load_weights(self, ticket: WeightTicket) -> str:
        self.tickets.append(ticket)
        self._version = ticket.version
        return ticket.digest

    async def pause(self) -> None:
        """Nothing runs between calls."""

    async def resume(self) -> None:
        """Nothing runs between calls."""

    async def version(self) -> int:
        return self._version

    async def health(self) -> dict[str, float]:
        return {"running": 0, "waiting": 0, "tokens": 0}

    async def close(self) -> None:
        """Nothing to free."""

    def _completion(self, ids: list[int]) -> Completion:
        is_ended = bool(ids) and ids[-1] in self._end_ids
        versions = [self._version] * len(ids)
        return Completion(ids, [-1.0] * len(ids), "stop" if is_ended else "length", versions)
