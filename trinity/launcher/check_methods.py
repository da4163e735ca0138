"""Whether the methods and operators that a configuration names take the arguments it gives them.

This imports them, and PyTorch with them: it is asked once a run is not refused for anything else.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from trinity import algorithm
from trinity.algorithm.sample_strategy.base import COLLABORATORS
from trinity.buffer.operators import EXPERIENCE_OPERATORS
from trinity.common.config import Config
from trinity.common.config.check_algorithm import METHOD_REGISTRIES
from trinity.common.config.nearest import nearest
from trinity.common.errors import Problem
from trinity.utils.registry import Registry


def method_problems(config: Config) -> Iterator[Problem]:
    """Arguments that no method or operator of this configuration takes, each by its key."""
    for field, registry in METHOD_REGISTRIES.items():
        name = getattr(config.algorithm, field)
        if name:
            args = getattr(config.algorithm, f"{field}_args")
            yield from _unknown(f"algorithm.{field}_args", name, getattr(algorithm, registry), args)
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
    known = [p.name for p in parameters if p.name not in COLLABORATORS]
    for argument, value in (args or {}).items():
        if argument in known:
            continue
        close = nearest(argument, known)
        fix = f"Did you mean `{close}`?" if close else f"It takes: {', '.join(known) or 'none'}."
        yield Problem(f"{key}.{argument}", f"{name} takes no such argument.", fix, value)
