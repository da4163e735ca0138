"""Chat messages to text and token ids: the only place that applies a chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trinity.common.models.messages import Messages, Tools, for_template
from trinity.common.models.settings import ModelSettings

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from trinity.common.models.vision import Vision

_MARK = re.compile(r"{%-?\s*generation\b")


class ChatFormat:
    """A model's tokenizer and chat template.

    Args:
        tokenizer: None: loaded from ``settings.model_path`` when first needed.
    """

    def __init__(
        self, settings: ModelSettings, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self._settings = settings
        self._given = tokenizer

    @cached_property
    def vision(self) -> Vision | None:
        """How images become tokens; None if the model reads none."""
        settings = self._settings
        if not (settings.enable_multimodal and settings.gives_tokens):
            return None
        from trinity.common.models.vision import Vision

        return Vision(settings.model_path, settings.trust_remote_code)

    def _show_image(self, image: object) -> str:
        assert self.vision is not None
        return str(self.tokenizer.convert_ids_to_tokens(self.vision.token_id))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._given is not None:
            return self._given
        from trinity.common.models.loading import load_tokenizer  # transformers takes seconds

        return load_tokenizer(self._settings.model_path, self._settings.trust_remote_code)

    def render(
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        reply_follows: bool = True,
        continues_last: bool = True,
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text.

        Args:
            reply_follows: Whether the text ends where the assistant's reply begins.
            continues_last: A last message of the assistant is the beginning of that reply and
                stays open; otherwise the reply is a turn of its own.
            template_args: More variables for the template.

        Raises:
            ValueError: The model has no chat template, or it can't take these messages.
        """
        if not self._template:
            raise ValueError(
                f"{self._settings.model_path!r} has no chat template, so it can't chat. Set "
                "model.custom_chat_template or model.chat_template_path, or use generate()."
            )
        is_open = (
            reply_follows
            and continues_last
            and bool(messages)
            and messages[-1].get("role") == "assistant"
        )
        text = self._applied(
            messages,
            tools,
            template_args or {},
            add_generation_prompt=reply_follows and not is_open,
            continue_final_message=is_open,
            tokenize=False,
        )
        return str(text)

    def encode_marked(
        self, messages: Messages, tools: Tools | None = None
    ) -> tuple[list[int], list[bool]] | None:
        """Token ids, and True on the assistant's; None if no `{% generation %}` marks them."""
        if not isinstance(self._template, str) or not _MARK.search(self._template):
            return None
        found = self._applied(
            messages, tools, {}, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(found["input_ids"]), [bool(bit) for bit in found["assistant_masks"]]

    @property
    def _template(self) -> object:
        return self._settings.chat_template or self.tokenizer.chat_template

    def _applied(
        self, messages: Messages, tools: Tools | None, given: Mapping[str, Any], **ours: Any
    ) -> Any:
        """What the template makes of messages.

        Raises:
            ValueError: It can't take them, or a variable in ``given`` is not the caller's.
        """
        from jinja2 import TemplateError

        show_image = None if self.vision is None else self._show_image
        thinking = self._settings.enable_thinking
        ours["conversation"] = [for_template(message, show_image) for message in messages]
        ours["tools"] = [dict(tool) for tool in tools] if tools else None
        ours["chat_template"] = self._settings.chat_template
        if taken := sorted(ours.keys() & given.keys()):
            raise ValueError(f"chat_template_kwargs can't have {taken[0]!r}: that is not its own.")
        defaults = {} if thinking is None else {"enable_thinking": thinking}
        try:
            return self.tokenizer.apply_chat_template(**ours, **{**defaults, **given})
        except (TemplateError, TypeError) as error:
            raise ValueError(f"The chat template can't take these messages: {error}") from error

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that were added to the vocabulary: marks of turns and the like."""
        added = self.tokenizer.added_tokens_decoder
        return frozenset({*self.tokenizer.all_special_ids, *added})

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of text and the characters [start, end) that each stands for."""
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(found["input_ids"]), [tuple(span) for span in found["offset_mapping"]]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of text; special tokens written out in it are found."""
        ids = list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        return ids if self.vision is None else self.vision.expanded(ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(
            self.tokenizer.decode(
                list(token_ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def __getstate__(self) -> dict[str, object]:
        state = self.__dict__.copy()
        for cached in ("tokenizer", "special_ids", "vision"):
            state.pop(cached, None)
        return state
