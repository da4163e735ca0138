"""What a user imports to write a workflow: `Task`, the bases, and `WORKFLOWS`, their names."""

from trinity.common.workflows.check import check_workflow
from trinity.common.workflows.multi_turn import MultiTurnWorkflow
from trinity.common.workflows.names import WORKFLOWS
from trinity.common.workflows.simple import REWARD_ERROR, BaseSimpleWorkflow, SimpleWorkflow
from trinity.common.workflows.step_wise import (
    RewardPropagationWorkflow,
    StepWiseRewardWorkflow,
)
from trinity.common.workflows.task import Task
from trinity.common.workflows.workflow import Workflow

#: Old names: every workflow may be async, so the async ones are the same classes.
AsyncSimpleWorkflow = SimpleWorkflow
AsyncStepWiseRewardWorkflow = StepWiseRewardWorkflow
AsyncRewardPropagationWorkflow = RewardPropagationWorkflow

__all__ = [
    "REWARD_ERROR",
    "WORKFLOWS",
    "AsyncRewardPropagationWorkflow",
    "AsyncSimpleWorkflow",
    "AsyncStepWiseRewardWorkflow",
    "BaseSimpleWorkflow",
    "MultiTurnWorkflow",
    "RewardPropagationWorkflow",
    "SimpleWorkflow",
    "StepWiseRewardWorkflow",
    "Task",
    "Workflow",
    "check_workflow",
]
