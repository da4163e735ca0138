"""`react_workflow`: an agent that calls tools until it knows the answer, by an OpenAI client."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import PositiveInt

from trinity.common.experience import Experience
from trinity.common.models.api.errors import CONTEXT_LENGTH_EXCEEDED
from trinity.common.workflows import BaseSimpleWorkflow
from trinity.workflows.agent.merge import merge_turns
from trinity.workflows.agent.tools import Tool, load_tools

Messages = list[dict[str, Any]]

_SYSTEM_PROMPT = """\
Solve the task. Call tools where they help, several at once if you like. When you know the answer, \
give it inside \\boxed{} without calling a tool."""


class AgentWorkflow(BaseSimpleWorkflow):
    """Base of agents that talk to the model by an OpenAI client; every reply is recorded.

    A subclass writes `solve`: it uses ``self.client`` as it likes and returns the final answer as
    text. The answer is scored by the task's reward function, and all replies carry that reward.
    Needs `explorer.rollout_model.enable_history: true`.

    `workflow_args.merge_turns` (True): a reply that goes on from an earlier one becomes one row
    with it; False: each reply is a row of its own (`eid.step`).

    A conversation that outgrows the model ends with the replies that were sampled: the last of them
    is the answer. Metrics: ``turns``, ``outgrown`` (1 where that happened).
    """

    argument_types: ClassVar[Mapping[str, Any]] = {"merge_turns": bool}
    is_async: ClassVar[bool] = True
    default_reward_fn: ClassVar[str] = "math_boxed_reward"
    needs_history: ClassVar[bool] = True

    @property
    def client(self) -> Any:
        """An `openai.AsyncOpenAI` of the model that is trained."""
        return self.model.get_openai_async_client()

    async def solve(self) -> str:
        """Work on the task; the final answer."""
        raise NotImplementedError

    async def run_async(self) -> list[Experience]:
        answer, is_outgrown = await self._solved()
        replies = self.model.extract_experience_from_history()
        if not replies:
            raise RuntimeError(f"{type(self).__qualname__} ended without asking the model.")
        for step, reply in enumerate(replies):
            reply.eid.step = step
        await self._give_reward(replies, answer)
        num_turns = float(len(replies))
        if self.task.workflow_args.get("merge_turns", True):
            replies = merge_turns(replies)
        for reply in replies:
            reply.metrics |= {"turns": num_turns, "outgrown": float(is_outgrown)}
        return replies

    async def _solved(self) -> tuple[str, bool]:
        """The final answer, and whether the conversation outgrew the model on the way to it."""
        try:
            return await self.solve(), False
        except Exception as error:
            replies = self.model.extract_experience_from_history(clear_history=False)
            if getattr(error, "code", None) != CONTEXT_LENGTH_EXCEEDED or not replies:
                raise
            return replies[-1].response_text or "", True

    async def _give_reward(self, replies: Sequence[Experience], answer: str) -> None:
        """Score ``answer`` once; every reply carries the reward."""
        await self.score_last(replies, self.format_messages(), response=answer)


class ReActWorkflow(AgentWorkflow):
    """Reason, call tools, look at what they give, until an answer comes without a call.

    `workflow_args`: ``tools`` (["python"]; further ones by dotted path), ``max_turns`` (8),
    ``tool_obs_char_limit`` (4000). The model's server needs a tool parser
    (``enable_auto_tool_choice``, ``tool_call_parser``). Metrics: ``turns``, ``tool_calls``.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {
        "tools": Sequence[str],
        "max_turns": PositiveInt,
        "tool_obs_char_limit": int,
    }
    default_system_prompt: ClassVar[str] = _SYSTEM_PROMPT
    #: Replies at most, if `workflow_args` do not say.
    default_max_turns: ClassVar[int] = 8

    def tools(self) -> dict[str, Tool]:
        """What the agent may call."""
        arguments = self.task.workflow_args
        limit = int(arguments.get("tool_obs_char_limit", 4000))
        return load_tools(arguments.get("tools", ["python"]), limit)

    async def solve(self) -> str:
        tools, messages = self.tools(), self.format_messages()
        schemas = [dict(tool.schema) for tool in tools.values()]
        self.num_tool_calls = 0
        answer = ""
        for _ in range(self._max_turns):
            completion = await self.client.chat.completions.create(
                model=self.model.model_name,
                messages=messages,
                tools=schemas,
                **_openai_args(self.rollout_args),
            )
            message = completion.choices[0].message
            answer = message.content or ""
            if not message.tool_calls:
                break
            messages.append(message.model_dump(exclude_none=True))
            messages += await self._answers(message.tool_calls, tools)
        return answer

    @property
    def _max_turns(self) -> int:
        return int(self.task.workflow_args.get("max_turns", self.default_max_turns))

    async def run_async(self) -> list[Experience]:
        replies = await super().run_async()
        for reply in replies:
            reply.metrics["tool_calls"] = float(self.num_tool_calls)
        return replies

    async def _answers(self, calls: Sequence[Any], tools: dict[str, Tool]) -> Messages:
        """What the called tools give, in the order of the calls."""
        self.num_tool_calls += len(calls)
        texts = await asyncio.gather(*(_call(call.function, tools) for call in calls))
        return [
            {"role": "tool", "tool_call_id": call.id, "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]


async def _call(function: Any, tools: dict[str, Tool]) -> str:
    tool = tools.get(function.name)
    if tool is None:
        return f"Error: there is no tool {function.name!r}; there are: {', '.join(tools)}."
    return await tool.call(function.arguments)


def _openai_args(rollout_args: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters as the OpenAI client takes them: those it does not know in the body."""
    known = ("temperature", "top_p", "max_tokens", "seed", "stop")
    extra = {n: v for n, v in rollout_args.items() if n not in known and n != "logprobs"}
    arguments = {n: v for n, v in rollout_args.items() if n in known}
    return arguments | ({"extra_body": extra} if extra else {})
