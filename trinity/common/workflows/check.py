"""Whether a taskset's workflow and reward can work, before anything starts."""

from collections.abc import Iterator

from trinity.common.config.buffer import TasksetConfig
from trinity.common.errors import MissingExtraError, Problem
from trinity.common.rewards import REWARD_FUNCTIONS, make_scorer
from trinity.common.workflows.names import WORKFLOWS
from trinity.common.workflows.simple import BaseSimpleWorkflow, SimpleWorkflow
from trinity.common.workflows.workflow import Workflow
from trinity.utils.registry import UnknownNameError


def check_workflow(taskset: TasksetConfig) -> Iterator[Problem]:
    """Problems of the workflow and the reward that ``taskset`` names; keys are relative to it."""
    name = taskset.default_workflow_type
    workflow: type[Workflow] | None = None
    if name:
        try:
            workflow = WORKFLOWS.get(name)
        except UnknownNameError as error:
            yield Problem("default_workflow_type", str(error), value=name)
        except (ImportError, MissingExtraError) as error:
            yield Problem("default_workflow_type", f"It can't be imported: {error}.", value=name)
    yield from _reward_problems(taskset, workflow)


def _reward_problems(taskset: TasksetConfig, workflow: type[Workflow] | None) -> Iterator[Problem]:
    name = taskset.default_reward_fn_type
    if name:
        try:
            REWARD_FUNCTIONS.get(name)
        except (UnknownNameError, ImportError, MissingExtraError) as error:
            yield Problem("default_reward_fn_type", str(error), value=name)
            return
    if workflow is None or not issubclass(workflow, BaseSimpleWorkflow):
        return
    if name is None and _needs_reward(workflow) and not taskset.format.reward_fn_key:
        yield Problem(
            "default_reward_fn_type",
            f"The workflow {taskset.default_workflow_type!r} needs a reward, but none is named.",
            f"Name one of {', '.join(REWARD_FUNCTIONS.names())}, or one of your plugins.",
        )
    if name:
        try:
            make_scorer(name, taskset.reward_fn_args)
        except (TypeError, ValueError) as error:
            yield Problem("reward_fn_args", f"{error}.", value=taskset.reward_fn_args or None)


def _needs_reward(workflow: type[BaseSimpleWorkflow]) -> bool:
    is_plain = workflow.run_async is SimpleWorkflow.run_async
    return is_plain and workflow.runs_async() and workflow.default_reward_fn is None
