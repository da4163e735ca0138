"""What the source says of the arguments of built-in classes is what Python says of them."""

import inspect

import pytest

from trinity import algorithm
from trinity.algorithm.rollout_correction import RolloutCorrection
from trinity.buffer.operators import EXPERIENCE_OPERATORS
from trinity.buffer.storage.priority import PRIORITY_FUNC
from trinity.common.config import Config
from trinity.common.config.argument_types import parameters_of_callable
from trinity.common.config.check import find_problems
from trinity.common.config.check_algorithm import METHOD_REGISTRIES
from trinity.common.config.names import table_of
from trinity.common.config.signatures import parameters_of, workflow_arguments
from trinity.common.rewards import REWARD_FUNCTIONS
from trinity.common.workflows import WORKFLOWS
from trinity.utils.registry import Registry

REGISTRIES: dict[str, Registry] = {
    **{name: getattr(algorithm, name) for name in METHOD_REGISTRIES.values()},
    "EXPERIENCE_OPERATORS": EXPERIENCE_OPERATORS,
    "PRIORITY_FUNC": PRIORITY_FUNC,
    "REWARD_FUNCTIONS": REWARD_FUNCTIONS,
}
ENTRIES = [(registry, name) for registry in REGISTRIES for name in table_of(registry)]
ELSEWHERE = {"answer_parser", "auxiliary", "operators", "reader", "service_config"}
"""Arguments whose types are not written out where they are used."""


@pytest.mark.parametrize(("registry", "name"), ENTRIES)
def test_the_arguments_are_those_of_the_class(registry: str, name: str) -> None:
    entry = REGISTRIES[registry].get(name)
    signature = inspect.signature(entry).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature)
    is_open = takes_any or hasattr(entry.__init__, "__signature__")
    wanted = None if is_open else tuple(parameter.name for parameter in signature)
    found = parameters_of(registry, name)
    assert found is None if wanted is None else found is not None and tuple(found) == wanted


@pytest.mark.parametrize(("registry", "name"), ENTRIES)
def test_their_types_are_those_of_the_class(registry: str, name: str) -> None:
    found = parameters_of(registry, name) or {}
    imported = parameters_of_callable(REGISTRIES[registry].get(name)) or {}
    for argument in found.keys() - ELSEWHERE:
        assert found[argument] == imported[argument], argument


@pytest.mark.parametrize("name", table_of("WORKFLOWS"))
def test_the_argument_types_of_workflows_are_those_of_the_class(name: str) -> None:
    """Old names, whose classes the table does not write out, are judged once they are imported."""
    wanted = WORKFLOWS.get(name).all_argument_types()
    assert workflow_arguments(name) == (wanted if table_of("WORKFLOWS")[name] else {})


def test_misspelt_arguments_of_the_correction_are_told() -> None:
    right = {p.name: p.default for p in inspect.signature(RolloutCorrection).parameters.values()}
    algorithm = {"rollout_correction": {**right, "rollout_iss": "token"}}
    config = Config.model_validate({"algorithm": algorithm})
    key = "algorithm.rollout_correction"
    [problem] = [p for p in find_problems(config) if p.key.startswith(key)]
    assert problem.key == f"{key}.rollout_iss" and problem.fix == "Did you mean `rollout_is`?"


def test_what_is_none_of_ours_is_not_judged() -> None:
    assert parameters_of("POLICY_LOSS_FN", "my.own.Loss") is None


def test_arguments_of_methods_that_an_algorithm_of_a_plugin_brings_are_not_judged() -> None:
    """A file is checked without loading plugins: which loss such a type has is not known."""
    config = Config.model_validate(
        {"algorithm": {"algorithm_type": "mine", "policy_loss_fn_args": {"epsilon": 0.3}}}
    )
    assert not [p for p in find_problems(config) if "policy_loss_fn_args" in p.key]
    config.algorithm.policy_loss_fn = "ppo"
    assert [p for p in find_problems(config) if "policy_loss_fn_args" in p.key]
