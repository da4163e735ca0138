"""What a formatter is: one raw row in, one `Task` or `Experience` out."""

from abc import ABC, abstractmethod

from trinity.buffer.rows import Row
from trinity.buffer.schema.messages import ChatTokenizer, RowFault, Template
from trinity.common.config.buffer import FormatConfig
from trinity.common.experience import Experience


class ExperienceFormatter(ABC):
    """Base of formatters that make experiences.

    Args:
        config: Which column holds what.
        tokenizer: Hugging Face tokenizer; its chat template is used unless ``config`` has one.
        max_tokens: Longest sequence; None for no limit.
    """

    def __init__(
        self, config: FormatConfig, tokenizer: ChatTokenizer, max_tokens: int | None = None
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.template = Template(tokenizer, config.chat_template, config.enable_thinking)

    @classmethod
    @abstractmethod
    def required_keys(cls, config: FormatConfig) -> dict[str, str]:
        """Columns that every row must have: the config's key for it -> its name."""

    @abstractmethod
    def format(self, row: Row) -> Experience:
        """The experience of a row.

        Raises:
            RowFault: A value is missing, null, of the wrong type or too long.
        """

    def check_length(self, num_tokens: int, key: str) -> None:
        """`RowFault` if a sequence is longer than the model takes."""
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise RowFault(key, f"{num_tokens} tokens, above the limit of {self.max_tokens}")
