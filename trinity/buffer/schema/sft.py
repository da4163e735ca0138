"""Rows to train on by imitation: question and answer, dialogues, plain text."""

from trinity.buffer.rows import Row, lookup
from trinity.buffer.schema.base import ExperienceFormatter
from trinity.buffer.schema.messages import (
    RowFault,
    common_prefix,
    messages_of,
    text_of,
    tools_of,
)
from trinity.common.config.buffer import FormatConfig
from trinity.common.constants import PromptType
from trinity.common.experience import Experience, Messages
from trinity.common.models.masking import mask_messages


class SFTFormatter(ExperienceFormatter):
    """A dialogue that ends in an answer; the answer is what is trained on.

    With `enable_concatenated_multi_turn` every assistant turn is trained on, in one experience.
    """

    @classmethod
    def required_keys(cls, config: FormatConfig) -> dict[str, str]:
        if config.prompt_type is PromptType.MESSAGES:
            return {"messages_key": config.messages_key}
        return {"prompt_key": config.prompt_key, "response_key": config.response_key}

    @classmethod
    def check(cls, row: Row, config: FormatConfig) -> None:
        _dialogue(row, config)

    def format(self, row: Row) -> Experience:
        is_messages = self.config.prompt_type is PromptType.MESSAGES
        key = self.config.messages_key if is_messages else self.config.response_key
        messages = _dialogue(row, self.config)
        tools = tools_of(row, self.config.tools_key)
        if is_messages and self.config.enable_concatenated_multi_turn:
            return self._multi_turn(messages, tools, key)
        return self._last_turn(messages, tools, key)

    def _last_turn(self, messages: Messages, tools: Messages | None, key: str) -> Experience:
        if messages[-1]["role"] != "assistant":
            raise RowFault(key, f"the last message is by {messages[-1]['role']!r}, no answer")
        if len(messages) < 2:
            raise RowFault(key, "an answer without a question")
        prompt = self.prompt_ids(messages[:-1], tools)
        tokens = self.dialogue_ids(messages, tools)
        self.check_length(len(tokens), key)
        prompt_length = common_prefix(prompt, tokens)
        if not 0 < prompt_length < len(tokens):
            raise RowFault(key, "the chat template leaves nothing to train on")
        return Experience(
            tokens=tokens,
            prompt_length=prompt_length,
            messages=messages,
            tools=tools,
            prompt_text=self.chat.decode(tokens[:prompt_length]),
            response_text=self.chat.decode(tokens[prompt_length:]),
        )

    def _multi_turn(self, messages: Messages, tools: Messages | None, key: str) -> Experience:
        try:
            tokens, mask, start = mask_messages(self.chat, messages, tools, leaves_out_changed=True)
        except ValueError:
            raise RowFault(key, "no assistant turn to train on") from None
        self.check_length(len(tokens), key)
        prompt_length = max(start, 1)
        return Experience(
            tokens=tokens,
            prompt_length=prompt_length,
            action_mask=mask[prompt_length:],
            messages=messages,
            tools=tools,
            prompt_text=self.chat.decode(tokens[:prompt_length]),
            response_text=self.chat.decode(tokens[prompt_length:]),
        )


class CPTFormatter(ExperienceFormatter):
    """Plain text to go on training on; everything after its first token is trained on."""

    @classmethod
    def required_keys(cls, config: FormatConfig) -> dict[str, str]:
        return {"prompt_key": config.prompt_key}

    @classmethod
    def check(cls, row: Row, config: FormatConfig) -> None:
        text_of(row, config.prompt_key)

    def format(self, row: Row) -> Experience:
        key = self.config.prompt_key
        tokens = self.chat.encode(text_of(row, key), add_special_tokens=True)
        self.check_length(len(tokens), key)
        if len(tokens) < 2:
            raise RowFault(key, "a single token; there is nothing to train on")
        return Experience(tokens=tokens, prompt_length=1, response_text=text_of(row, key))


def _dialogue(row: Row, config: FormatConfig) -> Messages:
    """Question and answer, or the dialogue, of a row."""
    if config.prompt_type is PromptType.MESSAGES:
        return messages_of(row, config.messages_key)
    answer: dict[str, object] = {"role": "assistant", "content": text_of(row, config.response_key)}
    return [*prompt_messages(row, config), answer]


def prompt_messages(row: Row, config: FormatConfig) -> Messages:
    """The question of a plain-text row as messages: system prompt, if there is one, and user."""
    system = config.system_prompt
    if config.system_prompt_key:
        system = _optional_text(row, config.system_prompt_key) or system
    lead: Messages = [{"role": "system", "content": system}] if system else []
    return [*lead, {"role": "user", "content": text_of(row, config.prompt_key)}]


def _optional_text(row: Row, key: str) -> str | None:
    try:
        value = lookup(row, key)
    except KeyError:
        return None
    return None if value is None else str(value)
