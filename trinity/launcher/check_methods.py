"""Whether the methods and operators that a configuration names take the arguments it gives them.

This imports them, and PyTorch with them: it is asked once a run is not refused for anything else.
What ships with trinity was looked at before (`trinity.common.config.check_arguments`).
"""

import inspect
from collections.abc import Iterator
from typing import Any

from trinity import algorithm
from trinity.buffer.operators import EXPERIENCE_OPERATORS
from trinity.common.config import Config
from trinity.common.config.check_arguments import named_arguments, unknown_arguments
from trinity.common.errors import Problem
from trinity.utils.registry import Registry


def method_problems(config: Config) -> Iterator[Problem]:
    """Arguments that no method or operator of this configuration takes, each by its key."""
    for given in named_arguments(config):
        parameters = inspect.signature(_registry(given.registry).get(given.name)).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            yield from unknown_arguments(given, list(parameters))


def _registry(name: str) -> Registry[Any]:
    found: Registry[Any] = (
        EXPERIENCE_OPERATORS if name == "EXPERIENCE_OPERATORS" else getattr(algorithm, name)
    )
    return found
