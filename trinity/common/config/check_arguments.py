"""Checks of the arguments that methods and operators are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from trinity.common.config.algorithm_table import ALGORITHMS
from trinity.common.config.argument_types import type_problems
from trinity.common.config.case import Case, Check
from trinity.common.config.check_algorithm import METHOD_REGISTRIES
from trinity.common.config.check_data import tasksets_of
from trinity.common.config.derive_data import EXPERIENCES
from trinity.common.config.nearest import nearest
from trinity.common.config.root import Config
from trinity.common.config.signatures import (
    Parameters,
    parameters_of,
    parameters_of_class,
    workflow_arguments,
)
from trinity.common.errors import Problem

COLLABORATORS = ("reader", "batch_size", "auxiliary")
"""What a sample strategy is given besides its settings."""

_CORRECTION = "trinity.algorithm.rollout_correction.RolloutCorrection"
_REWARD_POLICY = "trinity.common.rewards.scoring.RewardPolicy"
_OPERATORS = "data_processor.experience_pipeline.operators"


class NamedArguments(NamedTuple):
    """Arguments at ``key`` for what ``registry`` calls ``name``."""

    key: str
    registry: str
    name: str
    args: Mapping[str, object]


def named_arguments(config: Config) -> Iterator[NamedArguments]:
    """What a configuration names and gives arguments to: methods, operators, a priority."""
    for field, registry in METHOD_REGISTRIES.items():
        args = getattr(config.algorithm, f"{field}_args")
        name = getattr(config.algorithm, field)
        if name:
            yield NamedArguments(f"algorithm.{field}_args", registry, name, args or {})
    for index, operator in enumerate(config.data_processor.experience_pipeline.operators):
        key = f"{_OPERATORS}.{index}.args"
        yield NamedArguments(key, "EXPERIENCE_OPERATORS", operator.name, operator.args)
    buffer = config.buffer.trainer_input.experience_buffer
    if buffer is not None and buffer.replay_buffer.enable:
        replay, key = buffer.replay_buffer, f"{EXPERIENCES}.replay_buffer.priority_fn_args"
        yield NamedArguments(key, "PRIORITY_FUNC", replay.priority_fn, replay.priority_fn_args)


def wrong_arguments(given: NamedArguments, taken: Parameters) -> Iterator[Problem]:
    """A problem for each argument that is not among those ``taken``, or of another type."""
    known = [name for name in taken if name not in COLLABORATORS]
    for argument, value in given.args.items():
        if argument in known:
            yield from type_problems(f"{given.key}.{argument}", value, taken[argument])
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
            yield from wrong_arguments(given, taken)


def _is_guessed(case: Case, given: NamedArguments) -> bool:
    """Whether the method is what a plugin's algorithm type brings: that is not loaded here."""
    is_of_plugin = case.config.algorithm.algorithm_type not in ALGORITHMS
    is_method = given.registry in METHOD_REGISTRIES.values()
    return is_method and is_of_plugin and not case.is_set(given.key.removesuffix("_args"))


def _correction(case: Case) -> Iterator[Problem]:
    args = case.config.algorithm.rollout_correction or {}
    given = NamedArguments("algorithm.rollout_correction", "", "The rollout correction", args)
    yield from wrong_arguments(given, parameters_of_class(_CORRECTION) or {})


def _rewards(case: Case) -> Iterator[Problem]:
    """A reward takes what is its own, and what says how it is called."""
    policy = parameters_of_class(_REWARD_POLICY) or {}
    for _, key, taskset in tasksets_of(case):
        name = taskset.default_reward_fn_type or ""
        own = parameters_of("REWARD_FUNCTIONS", name)
        args = taskset.reward_fn_args
        if own is None:
            args = {argument: value for argument, value in args.items() if argument in policy}
        given = NamedArguments(f"{key}.reward_fn_args", "REWARD_FUNCTIONS", name, args)
        yield from wrong_arguments(given, {**policy, **(own or {})})


def _workflows(case: Case) -> Iterator[Problem]:
    for _, key, taskset in tasksets_of(case):
        types = workflow_arguments(taskset.default_workflow_type or "")
        yield from mistyped(f"{key}.workflow_args", taskset.workflow_args, types)


def mistyped(
    key: str, args: Mapping[str, object], types: Mapping[str, object]
) -> Iterator[Problem]:
    """A problem for each of a workflow's arguments that is not of the type that it says."""
    for argument in args.keys() & types.keys():
        of_one = f"{key}.{argument}"
        yield from type_problems(of_one, args[argument], types[argument], reads_numbers=True)


ARGUMENT_CHECKS: tuple[Check, ...] = (_arguments, _correction, _rewards, _workflows)
