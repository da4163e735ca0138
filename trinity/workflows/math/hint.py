"""`math_hint_workflow`: ask, and hint after a wrong answer. For tasks with a checkable answer."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import PositiveInt

from trinity.common.experience import Experience
from trinity.common.workflows import SimpleWorkflow

_HINT = "That is not right. Check each step, then answer again inside \\boxed{}."


class MathHintWorkflow(SimpleWorkflow):
    """Up to ``workflow_args.max_turns`` attempts, with a hint after each wrong one.

    Every turn is one experience (`eid.step` counts them). All carry the reward of the last
    answer: a first attempt that a hint rescued is credited like a right one. A conversation that
    is too long for a further attempt ends with those there are.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {"max_turns": PositiveInt}
    default_reward_fn: ClassVar[str] = "math_boxed_reward"

    async def run_async(self) -> list[Experience]:
        messages = self.format_messages()
        turns: list[Experience] = []
        for step in range(int(self.task.workflow_args.get("max_turns", 2))):
            [turn] = await self.model.chat_async(messages, n=1, **self.rollout_args)
            is_too_long = turn.truncate_status == "prompt_truncated"
            if is_too_long and turns:
                break
            turn.eid.step = step
            turns.append(turn)
            await self.score_last(turns, messages)
            if is_too_long or turn.reward is None or turn.reward > 0:
                break
            messages += [
                {"role": "assistant", "content": turn.response_text},
                {"role": "user", "content": _HINT},
            ]
        return turns
