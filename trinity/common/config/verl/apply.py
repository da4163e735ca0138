"""Values of `trainer.trainer_config` that a key of ours means too, carried over to it."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from trinity.common.config.explain_errors import problems_of
from trinity.common.config.fill import Filler, value_at
from trinity.common.config.root import Config
from trinity.common.config.verl.keys import VERL_KEYS, Use, VerlKey, leaves
from trinity.common.errors import Problem


def apply_verl(filler: Filler) -> None:
    """Fill our keys from veRL's where a user gives only those."""
    for key, value in leaves(filler.config.trainer.trainer_config).items():
        entry = VERL_KEYS.get(key)
        if entry is None or entry.use is not Use.OWN or value is None:
            continue
        if filler.is_set(entry.ours):
            continue
        wanted = coerced(filler.config, entry.ours, our_value(entry, value))
        if not isinstance(wanted, Problem):
            filler.put(entry.ours, wanted, f"trainer.trainer_config.{key}")


def our_value(entry: VerlKey, value: Any) -> Any:
    """``value`` of veRL as we spell it."""
    if entry.values and isinstance(value, str | bool | int):
        return entry.values.get(value, value)
    return value


def coerced(config: Config, key: str, value: Any) -> Any:
    """``value`` as the field at ``key`` would hold it, or the problem with it."""
    *path, name = key.split(".")
    holder = value_at(config, path).model_copy()
    try:
        setattr(holder, name, value)
    except ValidationError as error:
        return problems_of(error, {name: value})[0]
    return getattr(holder, name)
