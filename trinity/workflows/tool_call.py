"""`tool_call_workflow`: call the right tools with the right arguments, in one turn."""

import json
from typing import Any, ClassVar

from trinity.common.experience import Experience
from trinity.common.workflows import SimpleWorkflow, Task


class ToolCallWorkflow(SimpleWorkflow):
    """Offers the row's tools to the chat template, and scores the calls in the reply.

    The tools are in the column ``format.tools_key`` (a list, or that as JSON), the right calls in
    ``format.response_key``. The prompt may be a text or a list of messages. A row without a tools
    column is expected to name its tools in the prompt, as ToolACE does.
    """

    default_reward_fn: ClassVar[str] = "tool_call_reward"

    def reset(self, task: Task) -> None:
        super().reset(task)
        self.tools = _tools(task.column(task.format_args.tools_key))

    async def run_async(self) -> list[Experience]:
        messages = self.format_messages()
        answers = await self.sample_answers(messages, tools=self.tools)
        for answer in answers:
            answer.tools = self.tools
        await self.score(answers, messages)
        return answers


def _tools(value: Any) -> list[dict[str, Any]] | None:
    tools = json.loads(value) if isinstance(value, str) else value
    return list(tools) if tools else None
