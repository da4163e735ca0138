"""Whether a taskset's workflow and reward can work, before anything starts."""

import inspect
from collections.abc import Iterator, Mapping

from trinity.common.config.argument_types import parameters_of_callable, type_problems
from trinity.common.config.buffer import TasksetConfig
from trinity.common.config.check_arguments import mistyped
from trinity.common.errors import MissingExtraError, Problem
from trinity.common.rewards import REWARD_FUNCTIONS, RewardPolicy, make_scorer
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
    faults = list(_class_faults(workflow)) if workflow is not None else []
    for message in faults:
        yield Problem("default_workflow_type", message, value=name)
    if faults:
        return
    if workflow is not None:
        yield from mistyped("workflow_args", taskset.workflow_args, workflow.all_argument_types())
    yield from _reward_problems(taskset, workflow)


def _class_faults(workflow: type[Workflow]) -> Iterator[str]:
    """Why no run of ``workflow`` could begin."""
    if not (isinstance(workflow, type) and issubclass(workflow, Workflow)):
        yield "It is no class that derives from trinity.common.workflows.Workflow."
        return
    if workflow.run is Workflow.run and workflow.run_async is Workflow.run_async:
        yield f"{workflow.__name__} has neither run nor run_async: write one of them."
    try:
        inspect.signature(workflow).bind(task=None, model=None, auxiliary_models=None)
    except TypeError as error:
        yield (
            f"{workflow.__name__}.__init__ can't be called with task, model and auxiliary_models "
            f"({error}): take them by these names, or leave __init__ out."
        )


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
        faults = list(_mistyped_reward_args(name, taskset.reward_fn_args))
        yield from faults
        if faults:
            return
        try:
            make_scorer(name, taskset.reward_fn_args)
        except (TypeError, ValueError) as error:
            yield Problem(
                "reward_fn_args", f"{str(error).rstrip('.')}.", value=taskset.reward_fn_args or None
            )


def _mistyped_reward_args(reward_fn: str, args: Mapping[str, object]) -> Iterator[Problem]:
    """Of plugins too: `trinity.common.config.check_arguments` sees what is built in."""
    for entry in (RewardPolicy, REWARD_FUNCTIONS.get(reward_fn)):
        taken = (parameters_of_callable(entry) if isinstance(entry, type) else None) or {}
        for argument in args.keys() & taken.keys():
            key = f"reward_fn_args.{argument}"
            yield from type_problems(key, args[argument], taken[argument])


def _needs_reward(workflow: type[BaseSimpleWorkflow]) -> bool:
    is_plain = workflow.run_async is SimpleWorkflow.run_async
    return is_plain and workflow.runs_async() and workflow.default_reward_fn is None
