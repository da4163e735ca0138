"""`ModelRun`: one run's use of a model. It asks the endpoint, and remembers what was sampled."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

from trinity.common.experience import Experience
from trinity.common.models.endpoint import Endpoint, Sample, SampleRequest, media
from trinity.common.models.messages import Messages, Tools
from trinity.common.models.replies import (
    ChatReply,
    chat_message,
    experience_of_row,
    masked_reply,
)
from trinity.common.models.reply_parsers import ParsedReply, parse_reply
from trinity.common.models.sampling import request_seed
from trinity.common.models.streaming import Listener
from trinity.common.models.transcript import (
    Conversation,
    Prompt,
    Reply,
    TokenRow,
    Transcript,
)


class ModelRun:
    """Seeds, history and state of one run.

    Args:
        seed: Call i of the run samples with a seed made of (``seed``, i) alone.
    """

    def __init__(self, endpoint: Endpoint, seed: int) -> None:
        self.seed = seed
        self.state: dict[str, Any] = {}
        self.history: list[Experience] = []
        """Every sampled reply, in order, if ``enable_history`` is on."""
        self.transcript = Transcript(endpoint.chat)
        self._endpoint = endpoint
        self._num_calls = 0

    async def replies(
        self,
        conversation: Conversation,
        sampling: Mapping[str, Any],
        *,
        is_api: bool = False,
        listener: Listener | None = None,
    ) -> list[ChatReply]:
        """``n`` replies to a conversation; see `SampleRequest` for the rest."""
        seed = self._next_seed()
        if not self._endpoint.settings.gives_tokens:
            replies = await self._endpoint.text_replies(conversation, sampling, seed)
            self._keep(reply.experience for reply in replies)
            return replies
        prompt = self.transcript.prompt(conversation)
        ids = prompt.row.ids
        pixels = self._endpoint.pixels(conversation.messages, ids)
        request = SampleRequest(ids, prompt.text, sampling, seed, is_api, listener, pixels)
        return [self._reply(prompt, sample, seed) for sample in await self._samples(request)]

    async def continuations(
        self,
        prompt: str | list[int],
        sampling: Mapping[str, Any],
        *,
        is_api: bool = False,
        listener: Listener | None = None,
    ) -> list[Sample]:
        """``n`` samples of a text or of token ids."""
        chat = self._endpoint.chat
        ids = chat.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        seed = self._next_seed()
        request = SampleRequest(ids, chat.decode(ids), sampling, seed, is_api, listener)
        return await self._samples(request)

    async def experience(
        self, messages: Messages, tools: Tools | None, temperature: float | None
    ) -> Experience:
        """A conversation up to its last assistant turn, of which all such turns are trained on.

        Raises:
            ValueError: Its turns were sampled at several temperatures.
        """
        endpoint, talk = self._endpoint, _until_last_reply(messages)
        row = self.transcript.known_row(Conversation(talk, tools))
        is_as_sampled = row is not None and not row.has_fork
        if row is None:
            row = await endpoint.scored_row(talk, tools, temperature)
        experience = experience_of_row(endpoint.chat, row, endpoint.longest_row)
        experience.multi_modal_inputs = media(endpoint.pixels(talk, row.ids))
        experience.info["temperature"] = _only_temperature(row)
        experience.metrics["token_fork"] = float(not is_as_sampled)
        return experience

    async def _samples(self, request: SampleRequest) -> list[Sample]:
        samples = await self._endpoint.samples(request)
        self._keep(experience for experience, completion in samples if completion is not None)
        return samples

    def _keep(self, experiences: Iterable[Experience]) -> None:
        if self._endpoint.settings.enable_history:
            self.history += experiences

    def _reply(self, prompt: Prompt, sample: Sample, seed: int) -> ChatReply:
        experience, completion = sample
        if completion is None:
            return masked_reply(experience)
        text = experience.response_text or ""
        parsed = self._parsed(text, prompt.conversation.tools)
        message = chat_message(parsed, seed)
        whole = self._endpoint.chat.decode(completion.token_ids, skip_special_tokens=True)
        reply = Reply(
            messages=[{"role": "assistant", "content": text}, message],
            row=prompt.row.with_sampled(completion, cast(float, experience.info["temperature"])),
            prompt_text=prompt.text,
            shown=[parsed.reasoning or "", parsed.content],
            is_cut=text != whole,
        )
        self.transcript.record(prompt.conversation, reply)
        if prompt.goes_on:
            experience.metrics["token_fork"] = float(prompt.is_fork)
            experience.metrics["token_drift"] = float(prompt.has_drift)
        return ChatReply(experience, text, message, completion)

    def _parsed(self, text: str, tools: Tools | None) -> ParsedReply:
        settings = self._endpoint.settings
        wants_calls = bool(tools) and settings.enable_auto_tool_choice
        parser = (settings.tool_call_parser or "hermes") if wants_calls else None
        return parse_reply(text, parser, settings.reasoning_parser)

    def _next_seed(self) -> int:
        self._num_calls += 1
        return request_seed(self.seed, self._num_calls)


def _until_last_reply(messages: Messages) -> Messages:
    places = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not places:
        raise ValueError("The conversation has no assistant turn to learn from.")
    return messages[: places[-1] + 1]


def _only_temperature(row: TokenRow) -> float:
    """The temperature of all that is trained on of a row: a trainer knows one for each."""
    if len(row.temperatures) > 1:
        told = " and ".join(f"{heat:g}" for heat in sorted(row.temperatures))
        raise ValueError(
            f"The turns of this conversation were sampled at temperatures {told}, and one "
            "experience has one: sample them alike, or return each turn as an experience."
        )
    [temperature] = row.temperatures
    return temperature
