"""Checks of `trainer.trainer_config`: no key of it is swallowed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trinity.common.config.case import Case, Check
from trinity.common.config.fill import value_at
from trinity.common.config.nearest import nearest
from trinity.common.config.verl.apply import coerced, our_value
from trinity.common.config.verl.keys import VERL_KEYS, Use, VerlKey, leaves
from trinity.common.config.verl.launch_table import IMPORTS
from trinity.common.constants import TrainerType
from trinity.common.errors import Problem

_PREFIX = "trainer.trainer_config"
_KINDS: dict[str, tuple[type, ...]] = {
    "count": (int,),
    "float": (int, float),
    "bool": (bool,),
}
_KIND_WORDS = {
    "count": "a whole number of at least 1",
    "float": "a number",
    "bool": "true or false",
}


def _trainer_config(case: Case) -> Iterator[Problem]:
    trainer = case.config.trainer
    if not trainer.trainer_config or not case.config.mode.trains:
        return
    if trainer.trainer_type is TrainerType.TINKER:
        message = "The Tinker service takes no settings of veRL."
        yield Problem(_PREFIX, message, "Remove it.")
        return
    for key, value in leaves(trainer.trainer_config).items():
        yield from _judge(case, key, value)


def _judge(case: Case, key: str, value: Any) -> Iterator[Problem]:
    entry = VERL_KEYS.get(key)
    is_torch = case.config.trainer.trainer_type is TrainerType.TORCH
    if entry is None:
        yield from _unlisted(key, value, is_torch)
    elif entry.use is Use.REFUSED:
        message = "This is set elsewhere."
        yield _problem(key, message, f"Set `{entry.ours}` instead.", value)
    elif entry.use is Use.OWN:
        yield from _own(case, entry, value)
    elif entry.use is Use.PROGRAM or (entry.use is Use.VERL and is_torch):
        yield from _fixed(entry, value)
    elif entry.use is Use.SAME:
        yield from _same(case, entry, value)
    elif entry.like and value is not None:
        taken = coerced(case.given, entry.like, value)
        if isinstance(taken, Problem):
            yield _problem(key, taken.message, taken.fix, value)
    elif entry.kind and value is not None:
        yield from _typed(entry, value)


def _unlisted(key: str, value: Any, is_torch: bool) -> Iterator[Problem]:
    if key in IMPORTS and IMPORTS[key].ours:
        yield _problem(key, "This is set elsewhere.", f"Set `{IMPORTS[key].ours}` instead.", value)
        return
    close = nearest(key, VERL_KEYS, cutoff=0.8) if is_torch else _misspelled(key)
    if close:
        fix = f"Did you mean `{close}`?"
    elif key.startswith("actor_rollout_ref.rollout."):
        fix = "Rollouts are set in `explorer.rollout_model`."
    else:
        fix = "Remove it, or set `trainer_type: verl`; docs/verl_keys.md lists what applies."
    if is_torch:
        yield _problem(key, "The torch backend has no such setting.", fix, value)
    elif close or key.startswith("actor_rollout_ref.rollout."):
        yield _problem(key, "This key of veRL has no effect here.", fix, value)


def _misspelled(key: str) -> str | None:
    """The key of the table that is the same but for a slip in its last word.

    veRL has many keys that the table has not, so others are left for veRL's own classes to judge.
    """
    parent, _, name = key.rpartition(".")
    siblings = [k.rpartition(".")[2] for k in VERL_KEYS if k.rpartition(".")[0] == parent]
    close = nearest(name, siblings, cutoff=0.8)
    return f"{parent}.{close}" if close else None


def _own(case: Case, entry: VerlKey, value: Any) -> Iterator[Problem]:
    if value is None:
        return
    if entry.values and value not in entry.values:
        known = ", ".join(map(str, entry.values))
        yield _problem(
            entry.key, "This is none of the known words.", f"Use one of: {known}.", value
        )
        return
    wanted = coerced(case.given, entry.ours, our_value(entry, value))
    if isinstance(wanted, Problem):
        yield _problem(entry.key, wanted.message, wanted.fix, value)
        return
    present = value_at(case.config, entry.ours.split("."))
    if present != wanted:
        message = f"`{entry.ours}` means the same and says {_plain(present)!r}."
        yield _problem(entry.key, message, "Remove one of the two.", value)


def _fixed(entry: VerlKey, value: Any) -> Iterator[Problem]:
    if any(value == allowed and type(value) is type(allowed) for allowed in entry.allowed):
        return
    if entry.use is Use.VERL:
        message, fix = (
            f"Only veRL can do this: {entry.why}.",
            "Remove it, or set `trainer_type: verl`.",
        )
    else:
        message, fix = f"This cannot be changed: {entry.why}.", "Remove it."
    yield _problem(entry.key, message, fix, value)


def _same(case: Case, entry: VerlKey, value: Any) -> Iterator[Problem]:
    prefix = f"{_PREFIX}."
    if entry.ours.startswith(prefix):
        present = leaves(case.config.trainer.trainer_config).get(entry.ours[len(prefix) :], False)
    else:
        present = value_at(case.config, entry.ours.split("."))
    if value is not None and value != present:
        message = f"There is one setting for all models: `{entry.ours}` is {_plain(present)!r}."
        yield _problem(entry.key, message, "Remove it, or make both alike.", value)


def _typed(entry: VerlKey, value: Any) -> Iterator[Problem]:
    is_flag = isinstance(value, bool)
    is_kind = isinstance(value, _KINDS[entry.kind]) and is_flag == (entry.kind == "bool")
    if not is_kind or (entry.kind == "count" and value < 1):
        message = f"This must be {_KIND_WORDS[entry.kind]}."
        yield _problem(entry.key, message, "Correct the value.", value)


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _problem(key: str, message: str, fix: str, value: Any) -> Problem:
    return Problem(f"{_PREFIX}.{key}", message, fix, value)


VERL_CHECKS: tuple[Check, ...] = (_trainer_config,)
