"""`Endpoint`: the model behind its engines. Prompts in, experiences out; it remembers nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from trinity.common.experience import Experience
from trinity.common.models.chat import ChatFormat
from trinity.common.models.engines import EngineGroup
from trinity.common.models.masking import mask_messages
from trinity.common.models.messages import Messages, Tools, content_text
from trinity.common.models.protocol import Completion, SamplingParams, TextEngine, require_in_bounds
from trinity.common.models.replies import (
    ChatReply,
    experience_of,
    masked_experience,
    text_reply,
    trained_temperature,
)
from trinity.common.models.sampling import sampling_params
from trinity.common.models.settings import ModelSettings
from trinity.common.models.streaming import Listener, sampled
from trinity.common.models.transcript import Conversation, TokenRow
from trinity.common.models.vision import PIXELS, images_in

Sample = tuple[Experience, Completion | None]
"""No completion where the prompt was too long."""


class PromptTooLongError(ValueError):
    """A prompt leaves no room for a reply."""


@dataclass(frozen=True)
class SampleRequest:
    """A prompt, and how to go on from it.

    Args:
        sampling: Fields of `SamplingParams`; the rest is as the settings say.
        is_api: Whether an API asks: of the limits only ``max_model_len`` holds there.
        listener: Is told the tokens so far while the engine works.
        pixels: [images, C, H, W] of the prompt.
    """

    prompt_ids: list[int]
    prompt_text: str
    sampling: Mapping[str, Any]
    seed: int
    is_api: bool = False
    listener: Listener | None = None
    pixels: Tensor | None = None


@dataclass(frozen=True)
class Endpoint:
    """Where the requests of a model go.

    Args:
        adapter: Name of the adapter beside the model that all of them go through; None: the
            model itself.
    """

    group: EngineGroup
    chat: ChatFormat
    settings: ModelSettings
    adapter: str | None = None

    def through(self, adapter: str) -> "Endpoint":
        """The same through another adapter, which is not what is trained: no history is kept."""
        settings = replace(self.settings, name=adapter, adapter=adapter, enable_history=False)
        return replace(self, settings=settings, adapter=adapter)

    async def samples(self, request: SampleRequest) -> list[Sample]:
        """What the engines make of a prompt; stand-ins if it is too long.

        Raises:
            PromptTooLongError: It is, and ``enable_prompt_truncation`` is off or an API asks.
        """
        settings = self.settings.for_api() if request.is_api else self.settings
        prompt_ids, limit = request.prompt_ids, settings.longest_prompt
        params = sampling_params(settings, len(prompt_ids), request.sampling, request.seed)
        if limit is not None and len(prompt_ids) > limit:
            if not settings.enable_prompt_truncation:
                raise PromptTooLongError(_too_long(len(prompt_ids), limit, request.is_api))
            return [
                (masked_experience(self.chat, prompt_ids, limit), None) for _ in range(params.n)
            ]
        completions = await self.group.ask(
            lambda engine: sampled(
                engine, prompt_ids, params, request.listener, request.pixels, self.adapter
            )
        )
        return [(self._experience(request, made, params), made) for made in completions]

    async def text_replies(
        self, conversation: Conversation, sampling: Mapping[str, Any], seed: int
    ) -> list[ChatReply]:
        """Replies of an engine that gives texts and no tokens."""
        messages = conversation.messages
        params = sampling_params(self.settings, 0, sampling, seed)
        replies = await self.group.ask(
            lambda engine: cast(TextEngine, engine).chat(messages, conversation.tools, params)
        )
        prompt_text = "\n".join(
            f"{m.get('role')}: {content_text(m, lambda image: '<image>')}" for m in messages
        )
        return [text_reply(prompt_text, reply, params) for reply in replies]

    async def token_logprobs(self, ids: list[int], temperature: float | None) -> list[float]:
        """Log-probability of each token but the first; None: at the settings' temperature."""
        heat = self.heat(temperature)
        return await self.group.ask(lambda engine: engine.logprobs(ids, heat, self.adapter))

    async def scored_row(
        self, messages: Messages, tools: Tools | None, temperature: float | None
    ) -> TokenRow:
        """A conversation encoded as a whole, with the logprobs of its assistant turns."""
        if self.chat.vision is not None and images_in(messages):
            raise ValueError("Of conversations with images only sampled ones become experiences.")
        ids, mask, _ = mask_messages(self.chat, messages, tools)
        version = await self.group.version()
        found = [0.0, *await self.token_logprobs(ids[: self.longest_row], temperature)]
        logprobs = [value if is_on else 0.0 for value, is_on in zip(found, mask, strict=False)]
        logprobs += [0.0] * (len(ids) - len(logprobs))
        versions = [version if is_on else -1 for is_on in mask]
        heats = frozenset({trained_temperature(self.heat(temperature))})
        return TokenRow(ids, mask, logprobs, versions, temperatures=heats)

    @property
    def longest_row(self) -> int | None:
        """Tokens of the longest conversation that becomes an experience; None: not known here."""
        longest = self.settings.max_model_len
        return None if longest is None else longest - 1

    def heat(self, temperature: float | None) -> float:
        """``temperature``, or that of the settings; `ValueError` for one nothing is sampled at."""
        heat = self.settings.temperature if temperature is None else temperature
        require_in_bounds("temperature", heat)
        return heat

    def pixels(self, messages: Messages, prompt_ids: Sequence[int]) -> Tensor | None:
        """[images, C, H, W] of the images in ``messages``; None without one."""
        vision = self.chat.vision
        return None if vision is None else vision.pixels(messages, prompt_ids)

    def _experience(
        self, request: SampleRequest, completion: Completion, params: SamplingParams
    ) -> Experience:
        experience = experience_of(
            self.chat, request.prompt_ids, request.prompt_text, completion, params
        )
        experience.multi_modal_inputs = media(request.pixels)
        return experience


def media(pixels: Tensor | None) -> dict[str, Tensor] | None:
    """Images as an experience has them."""
    return None if pixels is None else {PIXELS: pixels}


def _too_long(length: int, limit: int, is_api: bool) -> str:
    told = f"The prompt has {length} tokens, more than {limit} (max_model_len - 1)."
    if is_api:
        return told
    return (
        f"{told} Raise it, or set enable_prompt_truncation to true to leave such prompts out of "
        "training."
    )
