"""Find stop texts in sampled tokens."""

from collections.abc import Sequence

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_MARGIN = 8  # tokens before the window: a decoder may treat the first one its own way


class StopTexts:
    """Says whether the newest token completes one of some texts.

    Only the end of the tokens is decoded: a text of k bytes spans at most k tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = [text for text in texts if text]
        self._window = max((len(text.encode()) for text in self._texts), default=0) + _MARGIN

    def __call__(self, tokens: Sequence[int]) -> bool:
        window = list(tokens[-self._window :])
        text, before = self._decode(window), self._decode(window[:-1])
        return any(text.count(stop) > before.count(stop) for stop in self._texts)

    def _decode(self, tokens: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
