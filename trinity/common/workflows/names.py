"""`WORKFLOWS`: names of workflows. Built-ins are imported on first use."""

from trinity.common.workflows.workflow import Workflow
from trinity.utils.registry import Registry

_SIMPLE = "trinity.common.workflows.simple.SimpleWorkflow"
_MATH = "trinity.workflows.math.math.MathWorkflow"

WORKFLOWS: Registry[type[Workflow]] = Registry(
    "workflow",
    {
        "simple_workflow": _SIMPLE,
        "async_simple_workflow": _SIMPLE,
        "math_workflow": _MATH,
        "async_math_workflow": _MATH,
    },
)
