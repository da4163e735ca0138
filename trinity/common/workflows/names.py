"""`WORKFLOWS`: names of workflows. Built-ins are imported on first use; old names stay."""

from trinity.common.workflows.workflow import Workflow
from trinity.utils.registry import Registry

_AGENTS = "trinity.workflows.agent"
_ENVS = "trinity.workflows.envs"

_BUILT_IN = {
    "simple_workflow": "trinity.common.workflows.simple.SimpleWorkflow",
    "simple_mm_workflow": "trinity.workflows.multi_modal.SimpleMMWorkflow",
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
    "agentscope_react_workflow": f"{_AGENTS}.agentscope.AgentScopeReActWorkflow",
    "agentscope_workflow_adapter_v1": f"{_AGENTS}.agentscope.AgentScopeAdapterWorkflow",
    "python_tool_workflow": f"{_AGENTS}.python_tool.PythonToolWorkflow",
    "react_workflow": f"{_AGENTS}.react.ReActWorkflow",
    "agentscope_v1_react_search_workflow": f"{_AGENTS}.search.WebSearchWorkflow",
    "email_search_workflow": f"{_AGENTS}.search.EmailSearchWorkflow",
    "alfworld_workflow": f"{_ENVS}.alfworld.workflow.AlfworldWorkflow",
    "step_wise_alfworld_workflow": f"{_ENVS}.alfworld.workflow.StepWiseAlfworldWorkflow",
    "RAFT_reflect_alfworld_workflow": f"{_ENVS}.alfworld.workflow.ReflectAlfworldWorkflow",
    "sciworld_workflow": f"{_ENVS}.sciworld.workflow.SciWorldWorkflow",
    "webshop_workflow": f"{_ENVS}.webshop.workflow.WebShopWorkflow",
    "intercode_sql_workflow": f"{_ENVS}.sql.SQLWorkflow",
    "sudoku_workflow": f"{_ENVS}.sudoku.workflow.SudokuWorkflow",
    "textarena_workflow": f"{_ENVS}.textarena.workflow.TextArenaWorkflow",
    "verifiers_workflow": f"{_ENVS}.verifiers.workflow.VerifiersWorkflow",
    "frozen_lake_workflow": f"{_ENVS}.frozen_lake.workflow.FrozenLakeWorkflow",
}

#: Old name -> the name it stands for.
_OLD_NAMES = {
    "async_simple_workflow": "simple_workflow",
    "async_simple_mm_workflow": "simple_mm_workflow",
    "async_math_workflow": "math_workflow",
    "async_math_boxed_workflow": "math_boxed_workflow",
    "async_math_eval_workflow": "math_eval_workflow",
    "async_math_rm_workflow": "math_rm_workflow",
    "async_math_ruler_workflow": "math_ruler_workflow",
    "toolcall_workflow": "tool_call_workflow",
    "RAFT_alfworld_workflow": "alfworld_workflow",
    "as_react_workflow": "agentscope_react_workflow",
    "agentscope_react_math_workflow": "agentscope_react_workflow",
    "agentscopev0_react_math_workflow": "agentscope_react_workflow",
    "agentscope_workflow_adapter": "agentscope_workflow_adapter_v1",
}

#: Names of workflows. `Task.workflow` may also be a dotted path.
WORKFLOWS: Registry[type[Workflow]] = Registry(
    "workflow", _BUILT_IN | {old: _BUILT_IN[new] for old, new in _OLD_NAMES.items()}
)
