"""What a formatter is: one raw row in, one `Experience` out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from trinity.buffer.rows import Row
from trinity.buffer.rows.check import RowFault
from trinity.buffer.schema.messages import value_of
from trinity.common.config.buffer import FormatConfig
from trinity.common.experience import Experience, Messages
from trinity.common.models.chat import ChatFormat
from trinity.common.models.settings import ModelSettings

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


def unsampled(**fields: Any) -> Experience:
    """An experience that was written, not sampled: its loss is of the model's own distribution.

    So it is at temperature 1, whatever rollouts are sampled at.
    """
    return Experience(**fields, info={"temperature": 1.0})


class ExperienceFormatter(ABC):
    """Base of formatters that make experiences.

    Args:
        config: Which column holds what; its chat template and thinking win over the tokenizer's.
        tokenizer: Of the model that is trained.
        max_tokens: Longest sequence; None for no limit.
    """

    def __init__(
        self,
        config: FormatConfig,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        settings = ModelSettings(
            model_path=str(getattr(tokenizer, "name_or_path", "")),
            chat_template=config.chat_template,
            enable_thinking=config.enable_thinking,
            enable_multimodal=bool(config.image_key or config.video_key),
        )
        self.chat = ChatFormat(settings, tokenizer)

    @classmethod
    @abstractmethod
    def required_keys(cls, config: FormatConfig) -> dict[str, str]:
        """Columns that every row must have: the config's key for it -> its name."""

    @classmethod
    def check(cls, row: Row, config: FormatConfig) -> None:
        """`RowFault` for what is wrong with a row whatever the tokenizer: here, a missing value."""
        for key in cls.required_keys(config).values():
            value_of(row, key)

    @abstractmethod
    def format(self, row: Row) -> Experience:
        """The experience of a row.

        Raises:
            RowFault: A value is missing, null, of the wrong type or too long.
        """

    def prompt_ids(self, messages: Messages, tools: Messages | None) -> list[int]:
        """Tokens of a dialogue up to where the assistant's answer begins."""
        return self.chat.encode(self.chat.render(messages, tools, continues_last=False))

    def dialogue_ids(self, messages: Messages, tools: Messages | None) -> list[int]:
        """Tokens of a whole dialogue."""
        return self.chat.encode(self.chat.render(messages, tools, reply_follows=False))

    def check_length(self, num_tokens: int, key: str) -> None:
        """`RowFault` if a sequence is longer than the model takes."""
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise RowFault(key, f"{num_tokens} tokens, above the limit of {self.max_tokens}")
