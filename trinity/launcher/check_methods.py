"""Whether the methods and operators that a configuration names take the arguments it gives them.

This imports them, and PyTorch with them: it is asked once a run is not refused for anything else.
What ships with trinity was looked at before (`trinity.common.config.check_arguments`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from trinity import algorithm
from trinity.buffer.operators import EXPERIENCE_OPERATORS
from trinity.buffer.storage.priority import PRIORITY_FUNC
from trinity.common.config import Config
from trinity.common.config.argument_types import parameters_of_callable
from trinity.common.config.check_algorithm import METHOD_REGISTRIES
from trinity.common.config.check_arguments import named_arguments, wrong_arguments
from trinity.common.errors import Problem
from trinity.utils.registry import Registry

_REGISTRIES: Mapping[str, Registry[Any]] = {
    **{name: getattr(algorithm, name) for name in METHOD_REGISTRIES.values()},
    "EXPERIENCE_OPERATORS": EXPERIENCE_OPERATORS,
    "PRIORITY_FUNC": PRIORITY_FUNC,
}


def method_problems(config: Config) -> Iterator[Problem]:
    """Arguments that no method or operator of this configuration takes so, each by its key."""
    for given in named_arguments(config):
        taken = parameters_of_callable(_REGISTRIES[given.registry].get(given.name))
        if taken is not None:
            yield from wrong_arguments(given, taken)
