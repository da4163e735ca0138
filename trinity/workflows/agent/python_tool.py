"""`python_tool_workflow`: solve a problem with Python at hand, over several turns."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import PositiveInt

from trinity.common.experience import Experience
from trinity.common.workflows import BaseSimpleWorkflow, MultiTurnWorkflow
from trinity.workflows.agent.sandbox import run_python

_SYSTEM_PROMPT = """\
Solve the problem. You may run Python: write one block
```python
...
```
and stop; you are then shown what it prints. When you know the answer, give it inside \\boxed{} \
and write no more code."""
_CODE = re.compile(r"```(?:python|py)\s*\n(.*?)```", re.S)


class PythonToolWorkflow(BaseSimpleWorkflow, MultiTurnWorkflow):
    """A conversation in which the model's code is run; one experience, all its turns trained on.

    The reward function sees the last turn as ``response``. `workflow_args`: ``max_turns`` (5),
    ``code_timeout_s`` (5), ``memory_mb`` (1024). Metrics: ``turns``, ``code_runs``,
    ``code_errors``.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {
        "max_turns": PositiveInt,
        "code_timeout_s": float,
        "memory_mb": int,
    }
    is_async: ClassVar[bool] = True
    default_reward_fn: ClassVar[str] = "math_boxed_reward"
    default_system_prompt: ClassVar[str] = _SYSTEM_PROMPT

    async def run_async(self) -> list[Experience]:
        messages = self.format_messages()
        metrics = {"turns": 0.0, "code_runs": 0.0, "code_errors": 0.0}
        for _ in range(int(self.task.workflow_args.get("max_turns", 5))):
            [reply] = await self.model.chat_async(messages, n=1, **self.rollout_args)
            if reply.truncate_status == "prompt_truncated":
                if metrics["turns"] == 0:
                    return [reply]
                break
            last = reply
            metrics["turns"] += 1
            messages.append({"role": "assistant", "content": reply.response_text})
            code = code_in(reply.response_text or "")
            if code is None:
                break
            messages.append({"role": "user", "content": await self._output_of(code, metrics)})
        while messages[-1]["role"] != "assistant":
            messages.pop()
        whole = await self.process_messages_to_experience_async(messages, 0.0, metrics)
        return [await self._scored(whole, last, messages)]

    async def _output_of(self, code: str, metrics: dict[str, float]) -> str:
        arguments = self.task.workflow_args
        result = await run_python(
            code, float(arguments.get("code_timeout_s", 5)), int(arguments.get("memory_mb", 1024))
        )
        metrics["code_runs"] += 1
        metrics["code_errors"] += not result.ok
        return f"Output:\n```\n{result.output or '(nothing was printed)'}\n```"

    async def _scored(
        self, whole: Experience, last: Experience, messages: list[dict[str, object]]
    ) -> Experience:
        """The whole conversation with the reward of its last turn; 0 if it had to be cut."""
        if whole.truncate_status == "response_truncated":
            return whole
        await self.score(last, messages)
        whole.reward = last.reward
        whole.metrics |= last.metrics
        whole.info |= {name: value for name, value in last.info.items() if name not in whole.info}
        return whole


def code_in(reply: str) -> str | None:
    """The last block of Python in a reply; None without one."""
    blocks = _CODE.findall(reply)
    return blocks[-1] if blocks else None
