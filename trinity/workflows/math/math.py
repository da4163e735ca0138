"""`math_workflow`: think, then answer; the answer is checked as mathematics."""

from typing import ClassVar

from trinity.common.workflows import SimpleWorkflow

_SYSTEM_PROMPT = """\
You are given a problem. First think about it step by step inside <think> tags, then give only \
the final answer inside <answer> tags, like this:
<think>
your reasoning
</think>
<answer>
the final answer
</answer>"""


class MathWorkflow(SimpleWorkflow):
    """`SimpleWorkflow` with a system prompt that asks for think and answer tags."""

    default_reward_fn: ClassVar[str] = "math_reward"
    default_system_prompt: ClassVar[str] = _SYSTEM_PROMPT
