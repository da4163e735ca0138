"""Rows to train on by imitation: question and answer, dialogues, plain text."""

from collections.abc import Iterator
from contextlib import contextmanager

from trinity.buffer.rows import Row
from trinity.buffer.schema.base import ExperienceFormatter, unsampled
from trinity.buffer.schema.messages import (
    RowFault,
    common_prefix,
    messages_of,
    optional_value,
    text_of,
    tools_of,
)
from trinity.common.config.buffer import FormatConfig
from trinity.common.constants import PromptType
from trinity.common.experience import Experience, Messages
from trinity.common.models.masking import mask_messages
from trinity.common.models.media import check_media, media_of, parts_of
from trinity.common.models.vision import PIXELS


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
        if shows_images(config):
            images, videos = _media_columns(row, config)
            with _told_of(config.prompt_key):
                check_media(text_of(row, config.prompt_key), images, videos)

    def format(self, row: Row) -> Experience:
        is_messages = self.config.prompt_type is PromptType.MESSAGES
        key = self.config.messages_key if is_messages else self.config.response_key
        messages = _dialogue(row, self.config)
        tools = tools_of(row, self.config.tools_key)
        if is_messages and self.config.enable_concatenated_multi_turn:
            return self._multi_turn(messages, tools, key)
        if shows_images(self.config):
            return self._with_images(row, messages)
        return self._last_turn(messages, tools, key)

    def _with_images(self, row: Row, messages: Messages) -> Experience:
        """The answer to a question about pictures; its texts have the marks, not the pictures."""
        key = self.config.prompt_key
        images, videos = _media_columns(row, self.config)
        *lead, asked, answer = messages
        with _told_of(key):
            parts = parts_of(text_of(row, key), media_of(images, videos))
            shown = [*lead, {**asked, "content": parts}, answer]
            experience = self._last_turn(shown, None, self.config.response_key)
            assert self.chat.vision is not None
            pixels = self.chat.vision.pixels(shown, experience.tokens.tolist())
        experience.messages = messages
        experience.prompt_text = self.chat.render(shown[:-1], continues_last=False)
        experience.multi_modal_inputs = None if pixels is None else {PIXELS: pixels}
        return experience

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
        return unsampled(
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
        return unsampled(
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
        return unsampled(tokens=tokens, prompt_length=1, response_text=text_of(row, key))


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


def shows_images(config: FormatConfig) -> bool:
    """Whether rows have pictures or videos."""
    return bool(config.image_key or config.video_key)


def _media_columns(row: Row, config: FormatConfig) -> tuple[object, object]:
    """The images and the videos of a row; `RowFault` if it has neither."""
    found = [optional_value(row, key) for key in (config.image_key, config.video_key)]
    if all(value is None or value == [] for value in found):
        raise RowFault(config.image_key or config.video_key or "", "no image and no video")
    return found[0], found[1]


@contextmanager
def _told_of(key: str) -> Iterator[None]:
    """Pictures that can't be had, or don't fit the text at ``key``, are the row's fault."""
    try:
        yield
    except RowFault:
        raise
    except ValueError as error:
        raise RowFault(key, str(error)) from error


def _optional_text(row: Row, key: str) -> str | None:
    value = optional_value(row, key)
    return None if value is None else str(value)
