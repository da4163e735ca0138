"""Rows of preference pairs: a question, the answer that was chosen and the one that was not."""

from trinity.buffer.rows import Row, lookup
from trinity.buffer.schema.base import ExperienceFormatter, unsampled
from trinity.buffer.schema.messages import RowFault, common_prefix, messages_of, text_of, tools_of
from trinity.buffer.schema.sft import prompt_messages
from trinity.common.config.buffer import FormatConfig
from trinity.common.constants import PromptType
from trinity.common.experience import Experience, Messages


class DPOFormatter(ExperienceFormatter):
    """A pair of answers, as texts or as messages.

    With messages the answers may also be whole dialogues that start with the question; the
    column of the question may then be missing.
    """

    @classmethod
    def required_keys(cls, config: FormatConfig) -> dict[str, str]:
        answers = {"chosen_key": config.chosen_key, "rejected_key": config.rejected_key}
        is_messages = config.prompt_type is PromptType.MESSAGES
        return answers if is_messages else {"prompt_key": config.prompt_key, **answers}

    @classmethod
    def check(cls, row: Row, config: FormatConfig) -> None:
        _dialogues(row, config)

    def format(self, row: Row) -> Experience:
        prompt, chosen, rejected = _dialogues(row, self.config)
        tools = tools_of(row, self.config.tools_key)
        prompt_ids = self.prompt_ids(prompt, tools)
        chosen_ids = self.dialogue_ids([*prompt, *chosen], tools)
        rejected_ids = self.dialogue_ids([*prompt, *rejected], tools)
        self.check_length(max(len(chosen_ids), len(rejected_ids)), self.config.chosen_key)
        length = min(common_prefix(prompt_ids, ids) for ids in (chosen_ids, rejected_ids))
        if length == 0 or length >= min(len(chosen_ids), len(rejected_ids)):
            raise RowFault(self.config.chosen_key, "the chat template leaves no answer")
        return unsampled(
            tokens=prompt_ids[:length],
            chosen=chosen_ids[length:],
            rejected=rejected_ids[length:],
            messages=prompt,
            tools=tools,
            chosen_messages=chosen,
            rejected_messages=rejected,
            prompt_text=self.chat.decode(prompt_ids[:length]),
        )


def _dialogues(row: Row, config: FormatConfig) -> tuple[Messages, Messages, Messages]:
    """The question, the chosen answer and the rejected one."""
    if config.prompt_type is PromptType.PLAINTEXT:
        prompt = prompt_messages(row, config)
        chosen, rejected = _text(row, config.chosen_key), _text(row, config.rejected_key)
        return prompt, chosen, rejected
    chosen, rejected = _answer(row, config.chosen_key), _answer(row, config.rejected_key)
    prompt = _prompt(row, config.messages_key, chosen, rejected)
    shared = len(prompt)
    if chosen[:shared] == prompt and rejected[:shared] == prompt:
        chosen, rejected = chosen[shared:], rejected[shared:]
    if not chosen or not rejected:
        raise RowFault(config.chosen_key if not chosen else config.rejected_key, "empty")
    return prompt, chosen, rejected


def _prompt(row: Row, key: str, chosen: Messages, rejected: Messages) -> Messages:
    try:
        lookup(row, key)
    except KeyError:
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        if not shared:
            raise RowFault(key, "missing, and the answers don't share a question") from None
        return chosen[:shared]
    return messages_of(row, key)


def _answer(row: Row, key: str) -> Messages:
    """Messages at ``key``; one message or its text alone is the same as a list of it."""
    value = lookup(row, key) if key in row else None
    if isinstance(value, dict):
        return messages_of({key: [value]}, key)
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return _text(row, key)
    return messages_of(row, key)


def _text(row: Row, key: str) -> Messages:
    return [{"role": "assistant", "content": text_of(row, key)}]
