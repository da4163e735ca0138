import subprocess
import sys
from types import SimpleNamespace

import pytest

from trinity.algorithm import (
    ADVANTAGE_FN,
    ALGORITHM_TYPE,
    ENTROPY_LOSS_FN,
    KL_FN,
    POLICY_LOSS_FN,
    SAMPLE_STRATEGY,
    AlgorithmType,
)
from trinity.common.config.algorithm_table import ALGORITHMS, GROUP_ADVANTAGES, AlgorithmSpec


def config(mode="both", repeat_times=None):
    return SimpleNamespace(mode=mode, algorithm=SimpleNamespace(repeat_times=repeat_times))


def test_every_row_of_the_table_has_a_class_and_the_other_way_round():
    assert ALGORITHM_TYPE.names() == sorted(ALGORITHMS)
    for name, spec in ALGORITHMS.items():
        algorithm = ALGORITHM_TYPE.get(name)
        assert algorithm.name() == name
        assert algorithm.spec() == spec
        assert algorithm.family and algorithm.formula and algorithm.when and algorithm.__doc__


def test_the_table_of_group_advantages_is_exact():
    known = {name: ADVANTAGE_FN.get(name) for name in ADVANTAGE_FN.names() if "." not in name}
    ours = {n: c for n, c in known.items() if c.__module__.startswith("trinity.algorithm.")}
    of_groups = {name for name, function in ours.items() if not function.compute_in_trainer()}
    assert set(GROUP_ADVANTAGES) == of_groups
    twins = [twin for twin in GROUP_ADVANTAGES.values() if twin]
    assert all(ADVANTAGE_FN.get(twin).compute_in_trainer() for twin in twins)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_an_algorithm_names_exists_and_builds(name):
    spec = ALGORITHMS[name]
    for registry, method in (
        (POLICY_LOSS_FN, spec.policy_loss_fn),
        (KL_FN, spec.kl_loss_fn),
        (KL_FN, spec.kl_penalty_fn),
        (ENTROPY_LOSS_FN, spec.entropy_loss_fn),
    ):
        registry.get(method)(**registry.get(method).default_args())
    assert spec.sample_strategy in SAMPLE_STRATEGY
    if spec.advantage_fn is None:
        assert not spec.compute_advantage_in_trainer
        return
    advantage = ADVANTAGE_FN.get(spec.advantage_fn)
    assert advantage.compute_in_trainer() == spec.compute_advantage_in_trainer
    assert ("values" in getattr(advantage, "requires", ())) == spec.use_critic
    needs = POLICY_LOSS_FN.get(spec.policy_loss_fn).inputs()
    assert "advantages" in needs


def test_the_aggregation_mode_of_an_algorithm_is_that_of_its_loss():
    for spec in ALGORITHMS.values():
        default = POLICY_LOSS_FN.get(spec.policy_loss_fn).default_args().get("loss_agg_mode")
        assert default in (None, spec.loss_agg_mode)


def test_attributes_are_constant():
    with pytest.raises(AttributeError, match=r"GRPO\.use_critic is constant"):
        ALGORITHM_TYPE.get("grpo").use_critic = True


def test_modes_and_repeat_times_are_checked():
    ALGORITHM_TYPE.get("grpo").check_config(config(repeat_times=4))
    ALGORITHM_TYPE.get("grpo").check_config(config())
    with pytest.raises(ValueError, match="repeat_times is 1, but grpo needs 2 or more"):
        ALGORITHM_TYPE.get("grpo").check_config(config(repeat_times=1))
    with pytest.raises(
        ValueError, match="'sft', which runs only in mode train, but mode is 'both'"
    ):
        ALGORITHM_TYPE.get("sft").check_config(config())
    with pytest.raises(ValueError, match="repeat_times is 4, but dpo needs 2 samples"):
        ALGORITHM_TYPE.get("dpo").check_config(config(mode="train", repeat_times=4))


def test_a_plugin_algorithm_becomes_a_row_of_the_table():
    @ALGORITHM_TYPE.register_module("test_only_algorithm")
    class Mine(AlgorithmType):
        use_critic = True
        compute_advantage_in_trainer = True

        @classmethod
        def default_config(cls):
            return {"advantage_fn": "ppo", "policy_loss_fn": "cispo", "repeat_times": 3}

    try:
        spec = ALGORITHMS["test_only_algorithm"]
        assert Mine.name() == "test_only_algorithm"
        assert isinstance(spec, AlgorithmSpec)
        assert (spec.policy_loss_fn, spec.repeat_times, spec.use_critic) == ("cispo", 3, True)
        assert spec.min_repeat_times == 1
    finally:
        del ALGORITHMS["test_only_algorithm"]
        del ALGORITHM_TYPE._loaded["test_only_algorithm"]


def test_a_plugin_may_start_from_a_row():
    class Wide(AlgorithmType, table="grpo"):
        min_repeat_times = 4

    assert Wide.spec().policy_loss_fn == "ppo"
    assert (Wide.min_repeat_times, Wide.use_reference) == (4, True)
    assert Wide.name() == "wide"


def test_importing_the_registries_loads_no_torch():
    code = (
        "import sys, trinity.algorithm as a; a.ALGORITHM_TYPE.get('grpo');"
        "print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_base_classes_are_importable_from_the_package():
    import trinity.algorithm as package

    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="Nothing"):
        package.Nothing
