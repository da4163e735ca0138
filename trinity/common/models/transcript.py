"""The conversations of one run as token ids: later turns go on from what was sampled.

A chat template shows text. Encoding it anew each turn may give other ids than the model sampled,
so a `Transcript` keeps the ids of every reply and adds only what came after it. Where a template
shows an earlier turn differently than before, that is impossible: the conversation forks, and
the prompt is encoded anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from trinity.common.models.chat import ChatFormat
from trinity.common.models.messages import Message, Messages, Tools, prefix_keys
from trinity.common.models.protocol import Completion
from trinity.common.models.routes import joined

_PROBE = "trinity probe"


@dataclass(frozen=True)
class TokenRow:
    """Token ids with what is known of each: four lists of one length.

    ``is_sampled`` tells the model's own tokens; the others have logprob 0 and version -1.
    ``routes`` [tokens, layers, k] are those of as many tokens from the start as are known.
    ``temperatures`` are those that the logprobs were taken at. ``has_fork`` tells of earlier
    replies that are not among what was sampled, since they had to be encoded anew.
    """

    ids: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: Tensor | None = None
    temperatures: frozenset[float] = frozenset()
    has_fork: bool = False

    def with_context(self, ids: Sequence[int]) -> "TokenRow":
        """This row and tokens after it that were not sampled."""
        count = len(ids)
        return replace(
            self,
            ids=[*self.ids, *ids],
            is_sampled=[*self.is_sampled, *[False] * count],
            logprobs=[*self.logprobs, *[0.0] * count],
            versions=[*self.versions, *[-1] * count],
        )

    def with_sampled(self, completion: Completion, temperature: float) -> "TokenRow":
        """This row and a reply."""
        count = len(completion.token_ids)
        return replace(
            self,
            ids=[*self.ids, *completion.token_ids],
            is_sampled=[*self.is_sampled, *[True] * count],
            logprobs=[*self.logprobs, *completion.logprobs],
            versions=[*self.versions, *(completion.versions or [-1] * count)],
            routes=joined(self.routes, completion.routes),
            temperatures=self.temperatures | {temperature},
        )


@dataclass(frozen=True)
class Conversation:
    """What a chat template shows.

    Args:
        template_args: More variables for the template.
    """

    messages: Messages
    tools: Tools | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)

    def keys(self) -> list[bytes]:
        """One for each beginning of it: see `prefix_keys`."""
        return prefix_keys(self.messages, self.tools, dict(self.template_args))

    def beginning(self, count: int) -> "Conversation":
        """The first ``count`` messages of it."""
        return replace(self, messages=self.messages[:count])

    def bare(self) -> "Conversation":
        """Its messages alone."""
        return Conversation(self.messages)

    def with_message(self, message: Message) -> "Conversation":
        """It and one message more."""
        return replace(self, messages=[*self.messages, message])


@dataclass(frozen=True)
class Prompt:
    """A conversation up to where the reply begins.

    Args:
        text: As the template shows it.
        goes_on: It contains a reply of this run.
        is_fork: It contains one, but had to be encoded anew.
        has_drift: Encoding it anew would have given other ids.
    """

    conversation: Conversation
    row: TokenRow
    text: str
    goes_on: bool = False
    is_fork: bool = False
    has_drift: bool = False


@dataclass(frozen=True)
class Reply:
    """One sampled reply, as it will be looked for in later turns.

    Args:
        messages: The reply as a message, in each form in which a client may give it back.
        row: Token ids of prompt and reply.
        prompt_text: The prompt as the template showed it.
        shown: Texts of the reply that a template must show, in order, to be true to it. The form
            in which calls of tools are written is left to the template.
        is_cut: The tokens hold more than the text (it ended at a stop text).
    """

    messages: Sequence[Message]
    row: TokenRow
    prompt_text: str
    shown: Sequence[str]
    is_cut: bool = False


class Transcript:
    """What was sampled in one run, found again by the messages it was for."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._replies: dict[bytes, Reply] = {}
        self._by_messages: dict[bytes, Reply] = {}
        self._turn_end: str | None = None
        self.num_turns = 0
        self.num_forks = 0
        self.num_drifts = 0

    def prompt(self, conversation: Conversation) -> Prompt:
        """Token ids of a conversation that the model is to reply to."""
        text = self._shown(conversation)
        fresh = self._chat.encode(text)
        found = self._longest_known(conversation)
        if found is None:
            return Prompt(conversation, TokenRow().with_context(fresh), text)
        self.num_turns += 1
        count, reply = found
        row = self._continued(reply, text, conversation.beginning(count))
        if row is None:
            self.num_forks += 1
            row = TokenRow(has_fork=True).with_context(fresh)
            return Prompt(conversation, row, text, goes_on=True, is_fork=True)
        has_drift = row.ids != fresh
        self.num_drifts += has_drift
        return Prompt(conversation, row, text, goes_on=True, has_drift=has_drift)

    def record(self, conversation: Conversation, reply: Reply) -> None:
        """Keep what was sampled in reply to a conversation."""
        for message in reply.messages:
            whole = conversation.with_message(message)
            self._replies[whole.keys()[-1]] = self._by_messages[whole.bare().keys()[-1]] = reply

    def known_row(self, conversation: Conversation) -> TokenRow | None:
        """The ids of a conversation that ends in a reply of this run; None if it does not.

        One without tools and template variables is known by its messages alone.
        """
        key = conversation.keys()[-1]
        is_bare = conversation == conversation.bare()
        reply = self._replies.get(key) or (self._by_messages.get(key) if is_bare else None)
        return reply.row if reply else None

    def _shown(self, conversation: Conversation, *, reply_follows: bool = True) -> str:
        return self._chat.render(
            conversation.messages,
            conversation.tools,
            reply_follows=reply_follows,
            template_args=conversation.template_args,
        )

    def _longest_known(self, conversation: Conversation) -> tuple[int, Reply] | None:
        if not self._replies:
            return None
        keys = conversation.keys()
        for count in range(len(conversation.messages) - 1, 0, -1):
            reply = self._replies.get(keys[count])
            if reply is not None:
                return count, reply
        return None

    def _continued(self, reply: Reply, text: str, earlier: Conversation) -> TokenRow | None:
        """The reply's row and what ``text`` has after it; None if ``text`` shows it differently."""
        before = self._shown(earlier, reply_follows=False)
        is_true = before.startswith(reply.prompt_text) and text.startswith(before)
        if reply.is_cut or not is_true or not _shows(before[len(reply.prompt_text) :], reply.shown):
            return None
        rest = self._rest_of_turn(reply.row.ids[-1]) + text[len(before) :]
        return reply.row.with_context(self._chat.encode(rest))

    def _rest_of_turn(self, last_token: int) -> str:
        """What the template puts after a reply that ended with ``last_token``."""
        if self._turn_end is None:
            turns = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
            shown = self._chat.render(turns, reply_follows=False)
            self._turn_end = shown[shown.rindex(_PROBE) + len(_PROBE) :]
        last = self._chat.decode([last_token])
        is_end = bool(last) and last_token in self._chat.special_ids
        return self._turn_end.removeprefix(last) if is_end else self._turn_end


def _shows(text: str, parts: Sequence[str]) -> bool:
    """Whether ``text`` has the parts in this order."""
    place = 0
    for part in parts:
        wanted = part.strip()
        found = text.find(wanted, place)
        if found < 0:
            return False
        place = found + len(wanted)
    return True
