"""Dialogues in rows: reading them in the forms data sets have, and what a template makes."""

import json
from collections.abc import Mapping, Sequence
from typing import Protocol

from trinity.buffer.rows import Row, lookup
from trinity.buffer.rows.check import RowFault
from trinity.common.experience import Messages


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: object

    def apply_chat_template(self, conversation: object, **kwargs: object) -> object: ...

    def decode(self, token_ids: object, **kwargs: object) -> str: ...

    def __call__(self, text: str, **kwargs: object) -> Mapping[str, object]: ...


def value_of(row: Row, key: str) -> object:
    """The value at ``key``; `RowFault` if it is missing or null."""
    try:
        value = lookup(row, key)
    except KeyError:
        raise RowFault(key, f"missing; the row has {', '.join(row) or 'nothing'}") from None
    if value is None:
        raise RowFault(key, "null")
    return value


def text_of(row: Row, key: str) -> str:
    """The text at ``key``, which must not be blank."""
    value = value_of(row, key)
    if not isinstance(value, str):
        raise RowFault(key, f"of type {type(value).__name__}, not text")
    if not value.strip():
        raise RowFault(key, "empty")
    return value


def messages_of(row: Row, key: str) -> Messages:
    """The messages at ``key``: a list, or the same as JSON text. Cleaned, see `clean_message`."""
    value = _parsed(value_of(row, key), key)
    if not isinstance(value, list) or not value:
        raise RowFault(key, "not a list of messages" if value != [] else "empty")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowFault(key, "a message without a role")
    return [clean_message(message) for message in value]


def tools_of(row: Row, key: str) -> Messages | None:
    """The tools at ``key``: a list of objects, or the same as JSON text; None without any."""
    try:
        value = lookup(row, key)
    except KeyError:
        return None
    if value is None or value == "":
        return None
    value = _parsed(value, key)
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowFault(key, "not a list of objects")
    return [_without_nulls(tool) for tool in value] or None  # type: ignore[misc]  # objects


def clean_message(message: Mapping[str, object]) -> dict[str, object]:
    """A message as templates expect it.

    Fields that are null (tables give every row all fields) are dropped, objects as content become
    JSON text, and the arguments of tool calls become objects.
    """
    cleaned = {key: value for key, value in message.items() if value is not None}
    content = cleaned.get("content", "")
    is_parts = isinstance(content, list) and all(
        isinstance(part, dict) and "type" in part for part in content
    )
    if not isinstance(content, str) and not is_parts:
        content = json.dumps(content, ensure_ascii=False)
    cleaned["content"] = content
    calls = cleaned.get("tool_calls")
    if isinstance(calls, list):
        cleaned["tool_calls"] = [_clean_call(call) for call in calls]
    return cleaned


def _clean_call(call: object) -> object:
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    inner = function if isinstance(function, dict) else call
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = arguments
        if isinstance(parsed, dict):
            inner = {**inner, "arguments": parsed}
    elif isinstance(arguments, dict):
        inner = {**inner, "arguments": _without_nulls(arguments)}
    cleaned = {**call, "function": inner} if isinstance(function, dict) else inner
    return {key: value for key, value in cleaned.items() if value is not None}


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _parsed(value: object, key: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowFault(key, f"a text that is not JSON ({error})") from None


class Template:
    """A tokenizer's chat template with the settings of one data set.

    Args:
        chat_template: Template to use in place of the tokenizer's own.
        enable_thinking: Passed to the template, if not None.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        chat_template: str | None = None,
        enable_thinking: bool | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._options: dict[str, object] = {}
        if chat_template is not None:
            self._options["chat_template"] = chat_template
        if enable_thinking is not None:
            self._options["enable_thinking"] = enable_thinking

    def ids(
        self,
        messages: Messages,
        tools: Messages | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Token ids of a dialogue."""
        found = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
            **self._options,
        )
        return list(found)  # type: ignore[call-overload]  # ids

    def text(
        self,
        messages: Messages,
        tools: Messages | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """The dialogue as the model sees it."""
        found = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self._options,
        )
        return str(found)

    def ids_and_assistant_mask(
        self, messages: Messages, tools: Messages | None = None
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a dialogue, and True on those that an assistant turn consists of.

        With a template that marks them (`{% generation %}`) these are the marked ones. Otherwise a
        turn is what the template adds when the turn is added. A turn which the template shows
        differently once the dialogue goes on (some drop earlier reasoning) stays False: no
        policy would produce it in that form.
        """
        if "{% generation" in self._template_text() or "{%- generation" in self._template_text():
            return self._marked(messages, tools)
        ids = self.ids(messages, tools)
        mask = [False] * len(ids)
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start, stop = self._turn(messages, index, tools, ids)
            mask[start:stop] = [True] * (stop - start)
        return ids, mask

    def _turn(
        self, messages: Messages, index: int, tools: Messages | None, ids: list[int]
    ) -> tuple[int, int]:
        after = self.ids(messages[: index + 1], tools)
        if ids[: len(after)] != after:
            return 0, 0
        before = self.ids(messages[:index], tools, add_generation_prompt=True) if index else []
        return common_prefix(before, after), len(after)

    def _marked(self, messages: Messages, tools: Messages | None) -> tuple[list[int], list[bool]]:
        found = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._options,
        )
        ids, mask = found["input_ids"], found["assistant_masks"]  # type: ignore[index]  # a mapping
        return list(ids), [bool(bit) for bit in mask]

    def _template_text(self) -> str:
        template = self.chat_template or self.tokenizer.chat_template
        return template if isinstance(template, str) else ""


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading items two sequences share."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
