"""An experience as a reader wants it: whose words are whose."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from trinity.common.experience import Experience

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Turn:
    """A stretch of tokens of one origin.

    Args:
        who: "prompt", "model", or "context": what was put in between.
        is_sampled: The model wrote it, and it is trained on.
    """

    who: str
    text: str
    num_tokens: int
    is_sampled: bool


def turns_of(experience: Experience, decode: Decode) -> Iterator[Turn]:
    """Prompt, then by turns what the model wrote and what it was told."""
    ids: list[int] = experience.tokens.tolist()
    prompt = ids[: experience.prompt_length]
    yield Turn("prompt", experience.prompt_text or decode(prompt), len(prompt), False)
    assert experience.action_mask is not None
    response = zip(ids[experience.prompt_length :], experience.action_mask.tolist(), strict=True)
    for is_sampled, group in groupby(response, key=lambda pair: pair[1]):
        turn = [token for token, _ in group]
        yield Turn("model" if is_sampled else "context", decode(turn), len(turn), is_sampled)
