"""Workflows that ask for one answer, which is checked as mathematics."""

from collections.abc import Mapping
from typing import Any, ClassVar

from trinity.common.experience import Experience
from trinity.common.rewards import RewardFn, Scorer, make_scorer
from trinity.common.workflows import SimpleWorkflow, Task
from trinity.rewards.math import MathEvalRewardFn

_SYSTEM_PROMPT = """\
You are given a problem. First think about it step by step inside <think> tags, then give only \
the final answer inside <answer> tags, like this:
<think>
your reasoning
</think>
<answer>
the final answer
</answer>"""
_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
_BOXED_THINK = (
    "First think about the problem inside <think> and </think>. Then give a short solution, and "
    "put your final answer within \\boxed{}."
)


class MathWorkflow(SimpleWorkflow):
    """`SimpleWorkflow` with a system prompt that asks for think and answer tags."""

    default_reward_fn: ClassVar[str] = "math_reward"
    default_system_prompt: ClassVar[str] = _SYSTEM_PROMPT


class MathBoxedWorkflow(SimpleWorkflow):
    r"""The answer is to stand in ``\boxed{}``.

    `workflow_args`: ``with_think`` asks for think tags first, ``format_score_coef`` is what their
    (or the box's) absence costs, ``use_base`` writes the prompt as plain text, for models without
    a chat template.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {
        "use_base": bool,
        "with_think": bool,
        "format_score_coef": float,
    }
    default_reward_fn: ClassVar[str] = "math_boxed_reward"

    def reset(self, task: Task) -> None:
        arguments = task.workflow_args
        self.use_base = bool(arguments.get("use_base", False))
        self.with_think = bool(arguments.get("with_think", False))
        super().reset(task)
        self.system_prompt = self.system_prompt or (_BOXED_THINK if self.with_think else _BOXED)

    async def run_async(self) -> list[Experience]:
        if not self.use_base:
            return await super().run_async()
        text = f"{self.system_prompt}\n\nUser: {self.task_desc}\n\nAssistant: "
        prompt = text + ("<think>\n" if self.with_think else "") + (self.reply_prefix or "")
        answers = await self.model.generate_async(prompt, n=self.repeat_times, **self.rollout_args)
        await self.score(self.with_run_ids(answers), self.format_messages())
        return answers

    def _make_scorer(self) -> Scorer | None:
        if self.task.reward_fn:
            return super()._make_scorer()
        own = ("with_think", "format_score_coef")
        settings = {n: v for n, v in self.task.workflow_args.items() if n in own}
        return make_scorer(self.default_reward_fn, settings | self.task.reward_fn_args)


class MathEvalWorkflow(SimpleWorkflow):
    r"""Accuracy alone, asked and sampled as the Qwen2.5-Math evaluation does: a boxed answer,
    temperature 0.6, top-p 0.8 unless the taskset says otherwise.
    """

    default_reward_fn: ClassVar[type[RewardFn]] = MathEvalRewardFn
    default_system_prompt: ClassVar[str] = _BOXED

    @property
    def rollout_args(self) -> dict[str, object]:
        asked = self.task.rollout_args.model_fields_set
        usual = {"temperature": 0.6, "top_p": 0.8}
        return super().rollout_args | {n: v for n, v in usual.items() if n not in asked}


class MathRMWorkflow(SimpleWorkflow):
    """`MathWorkflow` scored by a reward of yours, such as a reward model behind an API.

    The reward gets ``response``, ``messages`` and ``ground_truth``, and may be async.
    """

    default_system_prompt: ClassVar[str] = _SYSTEM_PROMPT
