"""`WORKFLOWS`: names of workflows. Built-ins are imported on first use; old names stay."""

from trinity.common.workflows.workflow import Workflow
from trinity.utils.registry import Registry

_BUILT_IN = {
    "simple_workflow": "trinity.common.workflows.simple.SimpleWorkflow",
    "math_workflow": "trinity.workflows.math.math.MathWorkflow",
    "math_boxed_workflow": "trinity.workflows.math.math.MathBoxedWorkflow",
    "math_eval_workflow": "trinity.workflows.math.math.MathEvalWorkflow",
    "math_rm_workflow": "trinity.workflows.math.math.MathRMWorkflow",
    "math_hint_workflow": "trinity.workflows.math.hint.MathHintWorkflow",
    "math_ruler_workflow": "trinity.workflows.judge.ruler.MathRulerWorkflow",
    "math_trainable_ruler_workflow": "trinity.workflows.judge.ruler.MathTrainableRulerWorkflow",
    "rubric_judge_workflow": "trinity.workflows.judge.rubric.RubricJudgeWorkflow",
    "rubric_judge_openai_workflow": "trinity.workflows.judge.rubric.RubricJudgeOpenAIWorkflow",
    "on_policy_distill_workflow": "trinity.workflows.distill.on_policy.OnPolicyDistillWorkflow",
    "on_policy_distill_math_workflow": (
        "trinity.workflows.distill.on_policy.OnPolicyDistillMathWorkflow"
    ),
    "reasoning_gym_workflow": "trinity.workflows.reasoning_gym.ReasoningGymWorkflow",
    "tool_call_workflow": "trinity.workflows.tool_call.ToolCallWorkflow",
    "python_tool_workflow": "trinity.workflows.agent.python_tool.PythonToolWorkflow",
    "react_workflow": "trinity.workflows.agent.react.ReActWorkflow",
    "sudoku_workflow": "trinity.workflows.envs.sudoku.workflow.SudokuWorkflow",
    "frozen_lake_workflow": "trinity.workflows.envs.frozen_lake.workflow.FrozenLakeWorkflow",
}

#: Old name -> the name it stands for.
_OLD_NAMES = {
    "async_simple_workflow": "simple_workflow",
    "async_math_workflow": "math_workflow",
    "async_math_boxed_workflow": "math_boxed_workflow",
    "async_math_eval_workflow": "math_eval_workflow",
    "async_math_rm_workflow": "math_rm_workflow",
    "async_math_ruler_workflow": "math_ruler_workflow",
    "toolcall_workflow": "tool_call_workflow",
}

#: Names of workflows. `Task.workflow` may also be a dotted path.
WORKFLOWS: Registry[type[Workflow]] = Registry(
    "workflow", _BUILT_IN | {old: _BUILT_IN[new] for old, new in _OLD_NAMES.items()}
)
