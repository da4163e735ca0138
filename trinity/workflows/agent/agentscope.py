"""Agents of the `agentscope` package (2.x), trained as they are: only their model is exchanged."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from pydantic import PositiveInt

from trinity.common.experience import Experience
from trinity.common.extras import needed
from trinity.workflows.agent.react import AgentWorkflow
from trinity.workflows.agent.tools import Tool, load_tools

_ASKED_BY = "An AgentScope workflow"
_SYSTEM_PROMPTS = {
    "gsm8k": "Solve the math problem. You may run Python. Put the final number inside \\boxed{}.",
    "": "Solve the task, with tools where they help. Put the final answer inside \\boxed{}.",
}


class AgentScopeReActWorkflow(AgentWorkflow):
    """AgentScope's agent with tools.

    `workflow_args`: ``type`` picks the system prompt (``gsm8k``), ``tools`` (["python"]) as in
    `react_workflow`, ``max_turns`` (8), ``context_size`` (the model's). The time and the state
    that AgentScope adds to prompts are off, so that prompts repeat. The reward is the task's
    reward function on the agent's last message.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {
        "type": str,
        "tools": Sequence[str],
        "max_turns": PositiveInt,
        "context_size": int | None,
    }

    async def solve(self) -> str:
        from_agentscope = _agentscope()
        arguments = self.task.workflow_args
        prompt = self.system_prompt or _SYSTEM_PROMPTS[str(arguments.get("type", ""))]
        agent = from_agentscope.agent.Agent(
            name="assistant",
            system_prompt=prompt,
            model=chat_model(self),
            toolkit=_toolkit(load_tools(arguments.get("tools", ["python"]))),
            react_config=from_agentscope.agent.ReActConfig(
                max_iters=int(arguments.get("max_turns", 8)),
                interruption_raise_cancelled_error=True,
            ),
            injection_config=from_agentscope.agent.InjectionConfig(inject_runtime_state=False),
        )
        question = from_agentscope.message.UserMsg(name="user", content=str(self.task_desc))
        reply = await agent.reply(question)
        return reply.get_text_content() or ""


class AgentScopeAdapterWorkflow(AgentWorkflow):
    """Functions written for AgentScope's tuner.

    `workflow_args.workflow_func` is the dotted path of ``async def f(task, model,
    auxiliary_models)``; what it returns has ``reward``, or ``response`` for
    `workflow_args.judge_func`, the path of ``async def f(task, response, auxiliary_models)``, whose
    result has ``reward``. Both may have ``metrics``, and take fewer arguments. ``task`` is the row.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {
        "workflow_func": str,
        "judge_func": str | None,
        "context_size": int | None,
    }
    default_reward_fn: ClassVar[None] = None  # type: ignore[assignment]  # judge_func is the reward

    async def run_async(self) -> list[Experience]:
        _agentscope()
        arguments = self.task.workflow_args
        if not arguments.get("workflow_func"):
            raise ValueError("agentscope_workflow_adapter needs workflow_args.workflow_func.")
        offered = {
            "task": self.raw_task,
            "model": chat_model(self),
            "auxiliary_models": {w.model_name: w for w in self.auxiliary_model_wrappers},
        }
        output = await _call(arguments["workflow_func"], offered)
        self._metrics = dict(_part(output, "metrics") or {})
        reward = _part(output, "reward")
        if reward is None and arguments.get("judge_func"):
            offered["response"] = _part(output, "response")
            verdict = await _call(arguments["judge_func"], offered)
            self._metrics |= dict(_part(verdict, "metrics") or {})
            reward = _part(verdict, "reward")
        if reward is None:
            raise ValueError("Neither workflow_func nor judge_func gave a reward.")
        self._reward = float(reward)
        return await super().run_async()

    async def solve(self) -> str:
        return ""  # `run_async` has done it

    async def _give_reward(self, replies: Any, answer: str) -> None:
        for reply in replies:
            reply.reward = self._reward
            reply.metrics |= {name: float(value) for name, value in self._metrics.items()}


def chat_model(workflow: AgentWorkflow) -> Any:
    """An AgentScope model whose every reply is the trained model's, and is recorded."""
    package = _agentscope()
    sampling = workflow.rollout_args
    model = package.model.OpenAIChatModel(
        credential=package.credential.OpenAICredential(api_key="none"),
        model=workflow.model.model_name,
        stream=False,
        max_retries=0,
        context_size=int(
            workflow.task.workflow_args.get("context_size")
            or workflow.model.model_config.max_model_len
            or 32_768
        ),
        parameters=package.model.OpenAIChatModel.Parameters(
            **{n: sampling[n] for n in ("temperature", "top_p", "max_tokens") if n in sampling}
        ),
    )
    model.client = workflow.client
    return model


def _toolkit(tools: Mapping[str, Tool]) -> Any:
    package = _agentscope()
    permission = package.permission
    allowed = permission.PermissionDecision(
        behavior=permission.PermissionBehavior.ALLOW, message="chosen by the configuration"
    )
    adapted = [
        package.tool.FunctionTool(
            _function_of(tool),
            name=tool.name,
            description=tool.schema["function"]["description"],
            input_schema=dict(tool.schema["function"]["parameters"]),
            permission=allowed,
        )
        for tool in tools.values()
    ]
    return package.tool.Toolkit(tools=adapted)


def _function_of(tool: Tool) -> Callable[..., Any]:
    async def call(**arguments: Any) -> Any:
        text = await tool.call(arguments)
        package = _agentscope()
        block = package.message.TextBlock(text=text)
        return package.tool.ToolChunk(content=[block])

    return call


async def _call(path: str | Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    """Call a function with those of the offered arguments that it takes."""
    function = path
    if isinstance(path, str):
        module, _, name = path.rpartition(".")
        function = getattr(import_module(module), name)
    assert callable(function)
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    result = function(**{n: v for n, v in offered.items() if takes_all or n in parameters})
    return await result if inspect.isawaitable(result) else result


def _part(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _agentscope() -> Any:
    """The package, with the parts used here imported."""
    for part in ("agent", "credential", "message", "model", "permission", "tool"):
        needed(f"agentscope.{part}", "agent", _ASKED_BY)
    return import_module("agentscope")
