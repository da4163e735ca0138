"""Checks of the arguments that methods and operators are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from trinity.common.config.algorithm_table import ALGORITHMS
from trinity.common.config.case import Case, Check
from trinity.common.config.check_algorithm import METHOD_REGISTRIES
from trinity.common.config.nearest import nearest
from trinity.common.config.root import Config
from trinity.common.config.signatures import parameters_of, parameters_of_class
from trinity.common.errors import Problem

COLLABORATORS = ("reader", "batch_size", "auxiliary")
"""What a sample strategy is given besides its settings."""

_CORRECTION = "trinity.algorithm.rollout_correction.RolloutCorrection"
_OPERATORS = "data_processor.experience_pipeline.operators"


class NamedArguments(NamedTuple):
    """Arguments at ``key`` for what ``registry`` calls ``name``."""

    key: str
    registry: str
    name: str
    args: Mapping[str, object]


def named_arguments(config: Config) -> Iterator[NamedArguments]:
    """What a configuration names and gives arguments to: methods, then operators."""
    for field, registry in METHOD_REGISTRIES.items():
        args = getattr(config.algorithm, f"{field}_args")
        name = getattr(config.algorithm, field)
        if name:
            yield NamedArguments(f"algorithm.{field}_args", registry, name, args or {})
    for index, operator in enumerate(config.data_processor.experience_pipeline.operators):
        key = f"{_OPERATORS}.{index}.args"
        yield NamedArguments(key, "EXPERIENCE_OPERATORS", operator.name, operator.args)


def unknown_arguments(given: NamedArguments, taken: Sequence[str]) -> Iterator[Problem]:
    """A problem for each argument that is not among those ``taken``."""
    known = [name for name in taken if name not in COLLABORATORS]
    for argument, value in given.args.items():
        if argument in known:
            continue
        close = nearest(argument, known)
        fix = f"Did you mean `{close}`?" if close else f"It takes: {', '.join(known) or 'none'}."
        message = f"{given.name} takes no such argument."
        yield Problem(f"{given.key}.{argument}", message, fix, value)


def _arguments(case: Case) -> Iterator[Problem]:
    """What does not come with trinity is asked once it is imported: `trinity.launcher`."""
    for given in named_arguments(case.config):
        taken = parameters_of(given.registry, given.name)
        if taken is not None and not _is_guessed(case, given):
            yield from unknown_arguments(given, taken)


def _is_guessed(case: Case, given: NamedArguments) -> bool:
    """Whether the method is what a plugin's algorithm type brings: that is not loaded here."""
    is_of_plugin = case.config.algorithm.algorithm_type not in ALGORITHMS
    is_method = given.registry in METHOD_REGISTRIES.values()
    return is_method and is_of_plugin and not case.is_set(given.key.removesuffix("_args"))


def _correction(case: Case) -> Iterator[Problem]:
    args = case.config.algorithm.rollout_correction or {}
    given = NamedArguments("algorithm.rollout_correction", "", "The rollout correction", args)
    yield from unknown_arguments(given, parameters_of_class(_CORRECTION) or ())


ARGUMENT_CHECKS: tuple[Check, ...] = (_arguments, _correction)
