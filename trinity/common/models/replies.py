"""From completions to experiences: texts, masks, versions and what was cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from trinity.common.experience import Experience
from trinity.common.models.chat import ChatFormat
from trinity.common.models.protocol import Completion, SamplingParams, TextReply
from trinity.common.models.reply_parsers import ParsedReply
from trinity.common.models.routes import filled
from trinity.common.models.transcript import TokenRow

MASKED_TEXT = "[This experience is masked out due to overlong prompt]"


@dataclass(frozen=True)
class ChatReply:
    """One reply, as experience and as message."""

    experience: Experience
    text: str
    message: dict[str, Any]
    completion: Completion | None
    """None for a masked stand-in."""


def chat_message(parsed: ParsedReply, seed: int) -> dict[str, Any]:
    """A reply as an OpenAI message.

    Args:
        seed: Of the request; the ids of calls are made of it.
    """
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call_{seed:012x}_{place}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(parsed.tool_calls)
        ]
    return message


def masked_reply(experience: Experience) -> ChatReply:
    """What `masked_experience` is as a message."""
    message = {"role": "assistant", "content": MASKED_TEXT}
    return ChatReply(experience, MASKED_TEXT, message, None)


def text_reply(prompt_text: str, reply: TextReply, params: SamplingParams) -> ChatReply:
    """A reply without tokens: one masked token stands for it, so that it is never trained on."""
    experience = Experience(
        tokens=[0, 0],
        prompt_length=1,
        logprobs=[0.0],
        action_mask=[False],
        prompt_text=prompt_text,
        response_text=reply.text,
        info={"finish_reason": reply.finish_reason, "temperature": params.temperature},
    )
    message = {**reply.message, "content": reply.text}
    return ChatReply(experience, reply.text, message, None)


def experience_of(
    chat: ChatFormat,
    prompt_ids: Sequence[int],
    prompt_text: str,
    completion: Completion,
    params: SamplingParams,
) -> Experience:
    """One sample as an experience. ``info`` tells version, temperature and why it ended."""
    info: dict[str, Any] = {"finish_reason": completion.finish_reason}
    if completion.versions:
        info["model_version"] = completion.versions[0]
        info["model_version_drift"] = completion.versions[-1] - completion.versions[0]
    info["temperature"] = trained_temperature(params.temperature)
    return Experience(
        tokens=[*prompt_ids, *completion.token_ids],
        logprobs=completion.logprobs,
        token_versions=completion.versions or None,
        routed_experts=completion.routes,
        prompt_length=len(prompt_ids),
        prompt_text=prompt_text,
        response_text=text_until_stop(chat, completion, params.stop),
        info=info,
    )


def trained_temperature(temperature: float) -> float:
    """The temperature that logprobs of samples are taken at: 1 for greedy ones."""
    return temperature or 1.0


def text_until_stop(chat: ChatFormat, completion: Completion, stops: Sequence[str]) -> str:
    """The text of a completion without special tokens, up to the stop text that ended it.

    That is the first of those that the last token completes; earlier ones were passed over, as
    ``min_tokens`` asked for.
    """
    text = chat.decode(completion.token_ids, skip_special_tokens=True)
    if completion.finish_reason != "stop" or not any(stops):
        return text
    before = chat.decode(completion.token_ids[:-1], skip_special_tokens=True)
    known = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False))
    )
    found = [text.find(stop, max(known - len(stop) + 1, 0)) for stop in stops if stop]
    return text[: min((place for place in found if place >= 0), default=len(text))]


def masked_experience(chat: ChatFormat, prompt_ids: Sequence[int], limit: int) -> Experience:
    """Stands for the reply to a prompt of more than ``limit`` tokens; it is never trained on."""
    tokens = list(prompt_ids[: limit + 1])
    return Experience(
        tokens=tokens,
        logprobs=[0.0],
        prompt_length=limit,
        reward=0.0,
        truncate_status="prompt_truncated",
        prompt_text=chat.decode(tokens[:limit]),
        response_text=MASKED_TEXT,
    )


def experience_of_row(chat: ChatFormat, row: TokenRow, limit: int | None) -> Experience:
    """A whole conversation as one multi-turn experience; the sampled tokens are trained on.

    Args:
        limit: Tokens at most; a longer row is cut to that and marked.
    """
    first = row.is_sampled.index(True)
    ids = row.ids if limit is None else row.ids[:limit]
    if first >= len(ids):
        return masked_experience(chat, row.ids, len(ids) - 1)
    end = len(ids)
    known = [version for version in row.versions[first:end] if version >= 0]
    versions = _filled(row.versions[first:end]) if known else None
    info: dict[str, Any] = {}
    if known:
        info = {"model_version": known[0], "model_version_drift": known[-1] - known[0]}
    return Experience(
        tokens=ids,
        prompt_length=first,
        logprobs=row.logprobs[first:end],
        action_mask=row.is_sampled[first:end],
        token_versions=versions,
        routed_experts=None if row.routes is None else filled(row.routes, end),
        truncate_status="response_truncated" if end < len(row.ids) else None,
        prompt_text=chat.decode(ids[:first]),
        response_text=chat.decode(ids[first:]),
        info=info,
    )


def _filled(versions: Sequence[int]) -> list[int]:
    """Versions with those of context tokens (-1) taken from the sampled token before."""
    filled, last = [], versions[0]
    for version in versions:
        last = version if version >= 0 else last
        filled.append(last)
    return filled
