"""Turns of one conversation as one row: trained on once, not once for every later turn."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch

from trinity.common.experience import Experience
from trinity.common.models.routes import joined


def merge_turns(experiences: Sequence[Experience]) -> list[Experience]:
    """Each chain of replies, where the tokens of one begin those of the next, as one experience.

    A reply whose prompt is not what came before (another conversation, or a template that shows
    earlier turns differently), or that was sampled at another temperature, begins a chain of its
    own. Rewards and metrics are those of the last reply of a chain; ``token_fork`` is the first's.
    """
    chains: list[list[Experience]] = []
    for experience in experiences:
        chain = next((c for c in reversed(chains) if _goes_on(c[-1], experience)), None)
        if chain is None:
            chains.append([experience])
        else:
            chain.append(experience)
    return [chain[0] if len(chain) == 1 else _merged(chain) for chain in chains]


def _goes_on(earlier: Experience, later: Experience) -> bool:
    """Whether the prompt of ``later`` begins with all tokens of ``earlier``, and both may be a row.

    A row is trained at one temperature.
    """
    length = len(earlier.tokens)
    is_alike = earlier.info.get("temperature") == later.info.get("temperature")
    is_longer = later.prompt_length >= length
    return is_alike and is_longer and torch.equal(later.tokens[:length], earlier.tokens)


def _merged(chain: Sequence[Experience]) -> Experience:
    first, last = chain[0], chain[-1]
    start = first.prompt_length
    length = len(last.tokens) - start
    mask = torch.zeros(length, dtype=torch.bool)
    logprobs = torch.zeros(length)
    versions = torch.full((length,), -1, dtype=torch.int32)
    for turn in chain:
        place = slice(turn.prompt_length - start, len(turn.tokens) - start)
        assert turn.action_mask is not None
        mask[place] = turn.action_mask
        if turn.logprobs is not None:
            logprobs[place] = turn.logprobs
        if turn.token_versions is not None:
            versions[place] = turn.token_versions
    has_versions = all(turn.token_versions is not None for turn in chain)
    return Experience(
        tokens=last.tokens,
        eid=replace(last.eid, step=first.eid.step),
        prompt_length=start,
        action_mask=mask,
        logprobs=logprobs,
        token_versions=versions if has_versions else None,
        routed_experts=reduce(joined, (turn.routed_experts for turn in chain)),
        reward=last.reward,
        truncate_status=last.truncate_status,
        info={**first.info, **last.info},
        metrics={**last.metrics, **{n: v for n, v in first.metrics.items() if n == "token_fork"}},
        prompt_text=first.prompt_text,
        response_text=last.response_text,
        messages=last.messages,
        tools=last.tools,
        multi_modal_inputs=last.multi_modal_inputs,
        custom_fields=last.custom_fields,
    )
