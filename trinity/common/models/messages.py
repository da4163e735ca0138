"""Chat messages: the form a template wants, and the key by which a message is known again."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

Message = Mapping[str, Any]
Messages = Sequence[Message]
Tools = Sequence[Mapping[str, Any]]


ShowImage = Callable[[object], str]
"""From an image to the text that stands for it."""


def for_template(message: Message, show_image: ShowImage | None = None) -> dict[str, Any]:
    """A message as chat templates read it: content as text, arguments of calls as objects.

    Raises:
        ValueError: It has no role, or a content or calls of another form than OpenAI's.
    """
    if not isinstance(message.get("role"), str):
        raise ValueError(f"A message has the role {message.get('role')!r}; it must be a name.")
    shown = {key: value for key, value in message.items() if value is not None}
    shown["content"] = content_text(message, show_image)
    if calls := _calls_of(message):
        shown["tool_calls"] = [_template_call(call) for call in calls]
    return shown


def content_text(message: Message, show_image: ShowImage | None = None) -> str:
    """The text of a message; parts in the OpenAI form are joined.

    Raises:
        ValueError: It is no text, or a part is neither text nor an image that can be shown.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Iterable):
        raise ValueError(f"A message has the content {content!r}; it must be text or parts.")
    texts = []
    for part in content:
        image = image_of_part(part)
        if image is not None and show_image is not None:
            texts.append(show_image(image))
            continue
        if not isinstance(part, Mapping) or "text" not in part:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind == "text":
                raise ValueError("A message has a part of type 'text' without a text.")
            raise ValueError(
                f"A message has a part of type {kind!r}; only text is understood"
                " (images with enable_multimodal)."
            )
        texts.append(str(part["text"]))
    return "".join(texts)


def image_of_part(part: object) -> object:
    """The image of a part, in whatever form it has it; None if the part is none."""
    if not isinstance(part, Mapping):
        return None
    if part.get("type") == "image_url":
        address = part.get("image_url")
        return address.get("url") if isinstance(address, Mapping) else address
    return part.get("image") if part.get("type") == "image" else None


def prefix_keys(messages: Messages, tools: Tools | None, context: object = None) -> list[bytes]:
    """One key for each beginning of a conversation: ``keys[j]`` stands for ``messages[:j]``.

    What a client may add to or leave out of a message it got (ids of calls, reasoning split off,
    nulls) is not in the key.
    """
    key = blake2b(_json([tools or [], context]), digest_size=16).digest()
    keys = [key]
    for message in messages:
        key = blake2b(key + _json(_essence(message)), digest_size=16).digest()
        keys.append(key)
    return keys


def _calls_of(message: Message) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, Iterable) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"A message has the tool_calls {calls!r}; it must be a list of calls.")
    return list(calls)


def _essence(message: Message) -> list[object]:
    calls = [_essence_of_call(call) for call in _calls_of(message)]
    name = message.get("name")
    text = content_text(message, _image_key)
    return [message.get("role"), text.strip() if calls else text, calls, name]


def _image_key(image: object) -> str:
    """A text that tells an image from others."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    raw = image if isinstance(image, bytes) else None
    if raw is None:
        read: Any = getattr(image, "tobytes", None)
        raw = read() if read is not None else str(image).encode()
    return f"<image {blake2b(raw, digest_size=16).hexdigest()}>"


def _essence_of_call(call: Mapping[str, Any]) -> list[object]:
    function = call.get("function") or call
    return [function.get("name"), parsed_arguments(function.get("arguments"))]


def parsed_arguments(arguments: object) -> object:
    """Arguments of a call as an object, if they are JSON."""
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments)
        except ValueError:
            return arguments
        has_escapes = "\\u" in arguments
        return json.loads(well_formed(_as_text(found))) if has_escapes else found
    return arguments


def well_formed(text: str) -> str:
    """``text`` with U+FFFD for half a surrogate pair: JSON may escape one, UTF-8 has none."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    shown = {key: value for key, value in call.items() if value is not None}
    if isinstance(call.get("function"), Mapping):
        function = dict(call["function"])
        shown["function"] = {**function, "arguments": parsed_arguments(function.get("arguments"))}
    elif "arguments" in shown:
        shown["arguments"] = parsed_arguments(shown["arguments"])
    return shown


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=_plain).encode()


def _as_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    return str(value)
