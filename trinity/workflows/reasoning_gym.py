"""`reasoning_gym_workflow`: tasks of `reasoning_gym`, judged by their own scorers."""

from typing import ClassVar

from trinity.common.workflows import SimpleWorkflow, Task

_SYSTEM_PROMPT = """\
Solve the task. Think inside <think> tags, then give the final answer, and nothing else, inside \
<answer> tags:
<think>
your reasoning
</think>
<answer>
the final answer
</answer>"""


class ReasoningGymWorkflow(SimpleWorkflow):
    """One answer to each task of a `reasoning_gym` data set (``storage_type: reasoning_gym``)."""

    default_reward_fn: ClassVar[str] = "reasoning_gym_reward"
    default_system_prompt: ClassVar[str] = _SYSTEM_PROMPT

    def reset(self, task: Task) -> None:
        super().reset(task)
        if self.task_desc is None:
            self.task_desc, self.truth = task.raw_task["question"], task.raw_task["answer"]
