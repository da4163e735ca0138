import pytest

from trinity.common.config.buffer import TasksetConfig
from trinity.common.workflows import WORKFLOWS, Workflow, check_workflow


def problems(**values):
    return [(p.key, p.message) for p in check_workflow(TasksetConfig(**values))]


def test_what_fits_has_no_problems():
    assert not problems(default_workflow_type="math_workflow")
    assert not problems(
        default_workflow_type="simple_workflow",
        default_reward_fn_type="math_reward",
        reward_fn_args={"on_error": "retry", "format_score_coef": 0.2},
    )
    assert not problems(default_workflow_type="simple_workflow", format={"reward_fn_key": "r"})
    assert not problems(default_workflow_type="rubric_judge_workflow")


@pytest.mark.parametrize(
    ("values", "key", "text"),
    [
        ({"default_workflow_type": "math_workflwo"}, "default_workflow_type", "'math_workflow'"),
        ({"default_workflow_type": "no.such.Thing"}, "default_workflow_type", "imported"),
        ({"default_workflow_type": "simple_workflow"}, "default_reward_fn_type", "needs a reward"),
        (
            {"default_workflow_type": "math_workflow", "default_reward_fn_type": "math_rewrad"},
            "default_reward_fn_type",
            "'math_reward'",
        ),
        (
            {
                "default_workflow_type": "math_workflow",
                "default_reward_fn_type": "math_reward",
                "reward_fn_args": {"coef": 1},
            },
            "reward_fn_args",
            "'coef'",
        ),
        (
            {
                "default_workflow_type": "math_workflow",
                "default_reward_fn_type": "math_reward",
                "reward_fn_args": {"format_score_coef": "high"},
            },
            "reward_fn_args.format_score_coef",
            "must be a number",
        ),
        (
            {
                "default_workflow_type": "async_math_boxed_workflow",
                "workflow_args": {"use_base": "no"},
            },
            "workflow_args.use_base",
            "true or false",
        ),
    ],
)
def test_what_does_not_fit_is_told(values, key, text):
    [(found_key, message)] = problems(**values)
    assert found_key == key and text in message


class NeitherRun(Workflow):
    pass


class OddInit(Workflow):
    def __init__(self, task, model):
        pass

    def run(self):
        return []


def a_function(task):
    return []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("NeitherRun", "NeitherRun has neither run nor run_async"),
        ("OddInit", "OddInit.__init__ can't be called with task, model and auxiliary_models"),
        ("a_function", "no class that derives from trinity.common.workflows.Workflow"),
    ],
)
def test_a_class_that_could_never_run_is_told_before_the_run(name, told, monkeypatch):
    monkeypatch.setattr(WORKFLOWS, "_loaded", dict(WORKFLOWS._loaded))  # it keeps what it finds
    [(key, message)] = problems(default_workflow_type=f"{__name__}.{name}")
    assert key == "default_workflow_type" and told in message
