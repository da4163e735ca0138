"""Token ids of a finished conversation, and which of them are the assistant's."""

from trinity.common.models.chat import ChatFormat
from trinity.common.models.messages import Messages, Tools, content_text


def mask_messages(
    chat: ChatFormat,
    messages: Messages,
    tools: Tools | None = None,
    *,
    leaves_out_changed: bool = False,
) -> tuple[list[int], list[bool], int]:
    """Token ids, True on those of assistant turns, and the length of the prompt before them.

    A turn is what a model would have sampled: the reply and the token that ends it. With a
    template that marks turns (`{% generation %}`) it is what is marked.

    Args:
        leaves_out_changed: A turn that the template shows differently once the conversation goes
            on (without its reasoning, say) is not learned from: no model would sample it so.

    Raises:
        ValueError: There is no assistant turn, or the template hides one.
    """
    marked = chat.encode_marked(messages, tools)
    if marked is not None:
        ids, mask = marked
    else:
        text = chat.render(messages, tools, reply_follows=False)
        ids, spans = chat.encode_with_spans(text)
        turns = _turns(chat, messages, tools, text, leaves_out_changed)
        mask = [any(start <= a < b <= end for start, end in turns) for a, b in spans]
    if not any(mask):
        raise ValueError("The conversation has no assistant turn to learn from.")
    return ids, mask, mask.index(True)


def _turns(
    chat: ChatFormat,
    messages: Messages,
    tools: Tools | None,
    text: str,
    leaves_out_changed: bool,
) -> list[tuple[int, int]]:
    """The characters [start, end) of ``text`` that each assistant turn has."""
    turns, place = [], 0
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = chat.render(messages[:index], tools, continues_last=False) if index else ""
        after = chat.render(messages[: index + 1], tools, reply_follows=False)
        if text.startswith(before) and text.startswith(after):
            start, end = len(before), len(after)
        elif leaves_out_changed:
            continue
        else:
            start, end = _found(text, content_text(message), place)
        end = start + len(_without_gap(text[start:end], chat))
        turns.append((start, end))
        place = end
    return turns


def _found(text: str, content: str, place: int) -> tuple[int, int]:
    """Where a reply stands that the template shows differently in the end."""
    wanted = content.strip()
    start = text.find(wanted, place)
    if start < 0:
        raise ValueError(
            f"The chat template leaves out or changes the assistant's turn {wanted[:60]!r}, so its "
            "tokens can't be found. Use a template that shows every turn as it was."
        )
    return start, start + len(wanted)


def _without_gap(turn: str, chat: ChatFormat) -> str:
    """A turn without the white space that a template puts after the token that ends it."""
    end = chat.tokenizer.eos_token
    if isinstance(end, str) and turn.rstrip().endswith(end):
        return turn.rstrip()
    return turn
