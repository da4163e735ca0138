"""What a user imports to write a workflow: `Task`, the bases, and `WORKFLOWS`, their names."""

from trinity.common.workflows.multi_turn import MultiTurnWorkflow
from trinity.common.workflows.names import WORKFLOWS
from trinity.common.workflows.simple import BaseSimpleWorkflow, SimpleWorkflow
from trinity.common.workflows.task import Task
from trinity.common.workflows.workflow import Workflow

#: Old names: every workflow may be async, so the async ones are the same classes.
AsyncSimpleWorkflow = SimpleWorkflow

__all__ = [
    "WORKFLOWS",
    "AsyncSimpleWorkflow",
    "BaseSimpleWorkflow",
    "MultiTurnWorkflow",
    "SimpleWorkflow",
    "Task",
    "Workflow",
]
