"""From replies to the JSON that OpenAI's clients expect, whole or in chunks."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from trinity.common.experience import Experience
from trinity.common.models.chat import ChatFormat
from trinity.common.models.protocol import Completion
from trinity.common.models.replies import ChatReply

Json = dict[str, Any]


def chat_completion(
    replies: Sequence[ChatReply],
    chat: ChatFormat,
    model: str,
    *,
    with_logprobs: bool,
    with_token_ids: bool,
) -> Json:
    """The answer to a chat request."""
    choices = []
    for index, reply in enumerate(replies):
        choice = {
            "index": index,
            "message": _message(reply.message),
            "finish_reason": chat_finish_reason(reply),
            "logprobs": {"content": token_logprobs(reply.completion, chat), "refusal": None}
            if with_logprobs
            else None,
        }
        if with_token_ids:
            choice["token_ids"] = reply.completion.token_ids if reply.completion else []
        choices.append(choice)
    experiences = [reply.experience for reply in replies]
    answer = _head("chatcmpl", "chat.completion", model, experiences[0])
    answer |= {"choices": choices, "usage": usage(experiences)}
    if with_token_ids:
        answer["prompt_token_ids"] = prompt_ids(experiences[0])
    return answer


def chat_begin(head: Json, index: int, text: str | None = None) -> str:
    """The event that begins a choice, or one with more ``text`` of it."""
    delta = {"role": "assistant", "content": ""} if text is None else {"content": text}
    choice = {"index": index, "delta": delta, "finish_reason": None}
    return _event({**head, "object": "chat.completion.chunk", "choices": [choice]})


def chat_chunks(
    answer: Json, *, with_usage: bool, sent: Mapping[int, str] | None = None
) -> Iterator[str]:
    """A chat answer as server-sent events.

    Args:
        sent: Choices that have begun -> the text of theirs that is out.
    """
    sent = sent or {}
    kept = ("id", "created", "model", "system_fingerprint", "prompt_token_ids")
    head = {name: answer[name] for name in kept if name in answer}
    head["object"] = "chat.completion.chunk"
    for choice in answer["choices"]:
        place = {"index": choice["index"]}
        if choice["index"] not in sent:
            yield chat_begin(head, choice["index"])
            head.pop("prompt_token_ids", None)
        for delta in _deltas(choice["message"], sent.get(choice["index"], "")):
            yield _event({**head, "choices": [{**place, "delta": delta, "finish_reason": None}]})
        last = {
            name: choice[name]
            for name in ("finish_reason", "logprobs", "token_ids")
            if name in choice
        }
        yield _event({**head, "choices": [{**place, "delta": {}, **last}]})
        head.pop("prompt_token_ids", None)
    if with_usage:
        yield _event({**head, "choices": [], "usage": answer["usage"]})
    yield "data: [DONE]\n\n"


def text_completion(
    outcome: Sequence[tuple[Experience, Completion]],
    chat: ChatFormat,
    model: str,
    *,
    with_logprobs: bool,
    with_token_ids: bool,
) -> Json:
    """The answer to a completion request."""
    choices = []
    for index, (experience, completion) in enumerate(outcome):
        choice: Json = {
            "index": index,
            "text": experience.response_text,
            "finish_reason": completion.finish_reason,
            "logprobs": _completion_logprobs(completion, chat) if with_logprobs else None,
        }
        if with_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = prompt_ids(experience)
        choices.append(choice)
    experiences = [experience for experience, _ in outcome]
    answer = _head("cmpl", "text_completion", model, experiences[0])
    return answer | {"choices": choices, "usage": usage(experiences)}


def text_begin(head: Json, index: int, text: str) -> str:
    """An event with more ``text`` of a choice."""
    choice = {"index": index, "text": text, "finish_reason": None, "logprobs": None}
    return _event({**head, "object": "text_completion", "choices": [choice]})


def text_chunks(
    answer: Json, *, with_usage: bool, sent: Mapping[int, str] | None = None
) -> Iterator[str]:
    """A completion answer as server-sent events, without the texts that are ``sent``."""
    head = {name: answer[name] for name in answer if name not in ("choices", "usage")}
    for choice in answer["choices"]:
        rest = _rest(choice["text"] or "", (sent or {}).get(choice["index"], ""))
        yield _event({**head, "choices": [{**choice, "text": rest}]})
    if with_usage:
        yield _event({**head, "choices": [], "usage": answer["usage"]})
    yield "data: [DONE]\n\n"


def chat_finish_reason(reply: ChatReply) -> str:
    """Why a reply ended, in OpenAI's words."""
    if reply.message.get("tool_calls"):
        return "tool_calls"
    return str(reply.experience.info.get("finish_reason", "length"))


def token_logprobs(completion: Completion | None, chat: ChatFormat) -> list[Json]:
    """One entry for each token; the alternatives are not known."""
    if completion is None:
        return []
    entries = []
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        text = chat.decode([token])
        entry = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        entries.append({**entry, "top_logprobs": []})
    return entries


def usage(experiences: Sequence[Experience]) -> Json:
    """Tokens of the prompts (each once) and of the replies."""
    seen = {tuple(prompt_ids(experience)) for experience in experiences}
    prompt = sum(len(ids) for ids in seen)
    reply = sum(experience.response_length for experience in experiences)
    counts = {"prompt_tokens": prompt, "completion_tokens": reply}
    return {**counts, "total_tokens": prompt + reply}


def prompt_ids(experience: Experience) -> list[int]:
    """Token ids of an experience's prompt."""
    ids: list[int] = experience.tokens[: experience.prompt_length].tolist()
    return ids


def error(message: str, kind: str = "invalid_request_error", code: str | None = None) -> Json:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _head(prefix: str, kind: str, model: str, experience: Experience) -> Json:
    version = experience.info.get("model_version", 0)
    return {
        "id": f"{prefix}-{uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"version-{version}",
    }


def _message(message: Json) -> Json:
    """A reply's message; OpenAI has null in place of an empty content beside calls."""
    if message.get("tool_calls") and not message["content"]:
        return {**message, "content": None}
    return message


def stream_head(prefix: str, model: str) -> Json:
    """What all events of a stream begin with."""
    return {"id": f"{prefix}-{uuid4().hex}", "created": int(time.time()), "model": model}


def error_event(message: str) -> str:
    """The event that ends a stream that failed."""
    return _event(error(message, "server_error"))


def _rest(text: str, sent: str) -> str:
    """What is still to be sent; nothing more where the end came out different."""
    return text[len(sent) :] if text.startswith(sent) else ""


def _deltas(message: Json, sent: str = "") -> Iterator[Json]:
    if message.get("reasoning_content"):
        yield {"reasoning_content": message["reasoning_content"]}
    for piece in _pieces(_rest(message.get("content") or "", sent)):
        yield {"content": piece}
    for index, call in enumerate(message.get("tool_calls") or []):
        yield {"tool_calls": [{"index": index, **call}]}


def _pieces(text: str, size: int = 32) -> Iterator[str]:
    for start in range(0, len(text), size):
        yield text[start : start + size]


def _completion_logprobs(completion: Completion, chat: ChatFormat) -> Json:
    texts = [chat.decode([token]) for token in completion.token_ids]
    offsets, place = [], 0
    for text in texts:
        offsets.append(place)
        place += len(text)
    return {
        "tokens": texts,
        "token_logprobs": completion.logprobs,
        "text_offset": offsets,
        "top_logprobs": None,
    }


def _event(data: Json) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
