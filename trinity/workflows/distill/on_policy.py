"""On-policy distillation: the student answers, the teacher says how likely each token was."""

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from trinity.common.experience import Experience
from trinity.common.workflows import SimpleWorkflow


class OnPolicyDistillWorkflow(SimpleWorkflow):
    """Answers of the student with the teacher's log-probabilities of their tokens.

    The teacher is the first auxiliary model; it must use the student's tokenizer.
    ``workflow_args.temperature`` is the teacher's (default: the student's own). A reward, if the
    taskset names one, is computed for the log; without one it is 0. Metric ``teacher_kl``: mean of
    student minus teacher log-probability over the response.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {"temperature": float}
    can_repeat: ClassVar[bool] = True

    async def run_async(self) -> list[Experience]:
        messages = self.format_messages()
        answers = await self.sample_answers(messages)
        for answer in answers:
            answer.reward = 0.0
        if self.scorer is not None:
            await self.score(answers, messages)
        await asyncio.gather(*map(self._teach, answers))
        return answers

    async def _teach(self, answer: Experience) -> None:
        if answer.truncate_status == "prompt_truncated":
            return
        if not self.auxiliary_model_wrappers:
            raise ValueError(
                "on_policy_distill_workflow needs a teacher: name a model in "
                "explorer.auxiliary_models."
            )
        temperature = self.task.workflow_args.get(
            "temperature", answer.info.get("temperature", 1.0)
        )
        teacher = self.auxiliary_model_wrappers[0]
        logprobs = await teacher.logprobs_async(answer.tokens, float(temperature))
        answer.teacher_logprobs = logprobs[answer.prompt_length - 1 :]
        if answer.logprobs is not None:
            gap = answer.logprobs - answer.teacher_logprobs
            answer.metrics["teacher_kl"] = float(gap.mean())


class OnPolicyDistillMathWorkflow(OnPolicyDistillWorkflow):
    """`OnPolicyDistillWorkflow` that also says how many answers are right."""

    default_reward_fn: ClassVar[str] = "math_boxed_reward"
    default_system_prompt: ClassVar[str] = (
        "Please reason step by step, and put your final answer within \\boxed{}."
    )
