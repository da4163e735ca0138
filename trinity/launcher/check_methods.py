"""Whether the methods and operators that a configuration names take the arguments it gives them.

This imports them, and PyTorch with them: it is asked once a run is not refused for anything else.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from trinity.algorithm import (
    ADVANTAGE_FN,
    ENTROPY_LOSS_FN,
    KL_FN,
    POLICY_LOSS_FN,
    SAMPLE_STRATEGY,
)
from trinity.buffer.operators import EXPERIENCE_OPERATORS
from trinity.common.config import Config
from trinity.common.config.nearest import nearest
from trinity.common.errors import Problem
from trinity.utils.registry import Registry

_METHODS: dict[str, Registry[Any]] = {
    "sample_strategy": SAMPLE_STRATEGY,
    "advantage_fn": ADVANTAGE_FN,
    "kl_penalty_fn": KL_FN,
    "policy_loss_fn": POLICY_LOSS_FN,
    "kl_loss_fn": KL_FN,
    "entropy_loss_fn": ENTROPY_LOSS_FN,
}
"""Key below ``algorithm`` -> what it names one of."""

_COLLABORATORS = {"reader", "batch_size", "auxiliary"}
"""What a sample strategy gets besides its settings."""


def method_problems(config: Config) -> Iterator[Problem]:
    """Arguments that no method or operator of this configuration takes, each by its key."""
    for field, registry in _METHODS.items():
        name = getattr(config.algorithm, field)
        if name:
            key = f"algorithm.{field}_args"
            yield from _unknown(key, name, registry, getattr(config.algorithm, f"{field}_args"))
    operators = config.data_processor.experience_pipeline.operators
    for index, operator in enumerate(operators):
        key = f"data_processor.experience_pipeline.operators.{index}.args"
        yield from _unknown(key, operator.name, EXPERIENCE_OPERATORS, operator.args)


def _unknown(
    key: str, name: str, registry: Registry[Any], args: Mapping[str, object] | None
) -> Iterator[Problem]:
    parameters = inspect.signature(registry.get(name)).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [p.name for p in parameters if p.name not in _COLLABORATORS]
    for argument, value in (args or {}).items():
        if argument in known:
            continue
        close = nearest(argument, known)
        fix = f"Did you mean `{close}`?" if close else f"It takes: {', '.join(known) or 'none'}."
        yield Problem(f"{key}.{argument}", f"{name} takes no such argument.", fix, value)
