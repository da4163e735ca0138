"""What the source says of the arguments of built-in classes is what Python says of them."""

import inspect

import pytest

from trinity import algorithm
from trinity.buffer.operators import EXPERIENCE_OPERATORS
from trinity.common.config.check_algorithm import METHOD_REGISTRIES
from trinity.common.config.names import table_of
from trinity.common.config.signatures import parameters_of

OPERATORS = "EXPERIENCE_OPERATORS"
ENTRIES = [
    (registry, name)
    for registry in (*dict.fromkeys(METHOD_REGISTRIES.values()), OPERATORS)
    for name in table_of(registry)
]


@pytest.mark.parametrize(("registry", "name"), ENTRIES)
def test_the_arguments_are_those_of_the_class(registry: str, name: str) -> None:
    entries = EXPERIENCE_OPERATORS if registry == OPERATORS else getattr(algorithm, registry)
    entry = entries.get(name)
    signature = inspect.signature(entry).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature)
    is_open = takes_any or hasattr(entry.__init__, "__signature__")
    wanted = None if is_open else tuple(parameter.name for parameter in signature)
    assert parameters_of(registry, name) == wanted


def test_what_is_none_of_ours_is_not_judged() -> None:
    assert parameters_of("POLICY_LOSS_FN", "my.own.Loss") is None
