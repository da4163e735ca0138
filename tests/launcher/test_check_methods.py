"""Arguments that a method or an operator does not take are told by their key, with the nearest."""

import pytest

from trinity.algorithm import POLICY_LOSS_FN, PolicyLossFn
from trinity.common.config import Config, derive
from trinity.launcher.check_methods import method_problems


def problems(**sections: object) -> dict[str, str]:
    data = {"model": {"model_path": "m", "max_model_len": 64}, **sections}
    config = derive(Config.model_validate(data)).config
    return {p.key: f"{p.message} {p.fix}" for p in method_problems(config)}


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "mix", "dpo", "sft", "gspo", "jsd", "gigpo"])
def test_what_is_filled_in_fits(algorithm: str) -> None:
    assert problems(algorithm={"algorithm_type": algorithm}) == {}


@pytest.mark.parametrize(
    ("field", "argument", "told"),
    [
        ("policy_loss_fn", "clip_rang_low", "ppo takes no such argument. Did you mean `clip_range"),
        ("advantage_fn", "epsilonn", "grpo takes no such argument. Did you mean `epsilon`?"),
        ("kl_loss_fn", "coef", "k2 takes no such argument. Did you mean `kl_coef`?"),
        ("sample_strategy", "reader", "default takes no such argument. It takes: none."),
        ("entropy_loss_fn", "zzz", "default takes no such argument. It takes: entropy_coef."),
    ],
)
def test_a_misspelt_argument_of_a_method(field: str, argument: str, told: str) -> None:
    found = problems(algorithm={"algorithm_type": "grpo", f"{field}_args": {argument: 1}})
    [(key, text)] = found.items()
    assert key == f"algorithm.{field}_args.{argument}" and text.startswith(told)


def test_a_misspelt_argument_of_an_operator() -> None:
    operators = [{"name": "reward_filter", "args": {"thresold": 0.5}}]
    found = problems(data_processor={"experience_pipeline": {"operators": operators}})
    [(key, text)] = found.items()
    assert key == "data_processor.experience_pipeline.operators.0.args.thresold"
    assert "Did you mean `threshold`?" in text


def test_arguments_of_another_type_are_told_of_plugins_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Mine(PolicyLossFn):
        def __init__(self, betas: tuple[float, float] = (0, 1), own=None, later: "int" = 1) -> None:
            """Only what is annotated is judged."""

    monkeypatch.setitem(POLICY_LOSS_FN._loaded, "of_a_test_with_types", Mine)

    def told(**arguments: object) -> dict[str, str]:
        algorithm = {"policy_loss_fn": "of_a_test_with_types", "policy_loss_fn_args": arguments}
        return problems(algorithm=algorithm)

    assert told(betas=[1, 0.5], own={"any": "thing"}, later=2) == {}
    key = "algorithm.policy_loss_fn_args"
    found = told(betas=[1, "x"], own="x", later="two")
    assert found == {
        f"{key}.betas.1": "This must be a number. Write a number, such as `0.1` or `1e-6`.",
        f"{key}.later": "This must be a whole number. Write digits only, such as `8`.",
    }
