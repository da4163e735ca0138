"""Rubrics: a judge says which of a task's criteria a response meets."""

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from trinity.common.experience import Experience
from trinity.common.workflows import REWARD_ERROR, SimpleWorkflow
from trinity.workflows.judge.judge import (
    RULE_OF_FENCES,
    Judge,
    ModelJudge,
    ServiceJudge,
    fenced,
    judged,
    texts_of,
)

_JUDGE = f"""\
You check a response to a question against numbered criteria. For each criterion give 1 if the \
response meets it, 0 if not, or a number between for partly. {RULE_OF_FENCES}
Answer with JSON alone: {{"scores": [score of criterion 1, score of criterion 2, ...]}}"""


class RubricJudgeWorkflow(SimpleWorkflow):
    """One answer, judged by criteria.

    The row's column ``workflow_args.rubric_key`` (default ``rubric``) lists the criteria, as
    texts or as objects with ``description`` (or ``criterion``) and ``weight``. The reward is the
    weighted share of those that are met; a negative weight takes off. The judge is the first
    auxiliary model. A judge that fails is asked again as `reward_fn_args` say; after that the
    sample is left out.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {
        "rubric_key": str,
        "judge_args": Mapping[str, Any],
    }
    can_repeat: ClassVar[bool] = True

    async def run_async(self) -> list[Experience]:
        messages = self.format_messages()
        answers = await self.sample_answers(messages)
        judge, criteria = self.judge(), self.criteria()
        await asyncio.gather(*(self._judge_one(judge, criteria, answer) for answer in answers))
        return answers

    def judge(self) -> Judge:
        """Who judges."""
        if not self.auxiliary_model_wrappers:
            raise ValueError(
                "rubric_judge_workflow needs a judge: name a model in explorer.auxiliary_models, "
                "or use rubric_judge_openai_workflow."
            )
        arguments = self.task.workflow_args.get("judge_args", {})
        return ModelJudge(self.auxiliary_model_wrappers[0], **arguments)

    def criteria(self) -> list[tuple[str, float]]:
        """Text and weight of each criterion of the row."""
        key = self.task.workflow_args.get("rubric_key", "rubric")
        rubric = self.task.column(key)
        if not rubric:
            raise ValueError(
                f"The row has no rubric in the column {key!r}; set workflow_args.rubric_key."
            )
        return [_criterion(item) for item in rubric]

    async def _judge_one(
        self, judge: Judge, criteria: list[tuple[str, float]], answer: Experience
    ) -> None:
        question = self._question(criteria, answer)
        scores = await judged(judge, question, len(criteria), self.task.reward_fn_args)
        if isinstance(scores, list):
            answer.reward = _weighted_share(scores, [weight for _, weight in criteria])
            answer.metrics |= {"rubric_score": answer.reward}
        else:
            answer.info[REWARD_ERROR] = f"rubric: {scores}"

    def _question(
        self, criteria: list[tuple[str, float]], answer: Experience
    ) -> list[dict[str, Any]]:
        listed = "\n".join(f"{number}. {text}" for number, (text, _) in enumerate(criteria, 1))
        [text] = texts_of([answer])
        parts = [
            f"Criteria:\n{listed}",
            fenced("question", self.task_desc),
            fenced("response", text),
        ]
        return [
            {"role": "system", "content": _JUDGE},
            {"role": "user", "content": "\n\n".join(parts)},
        ]


class RubricJudgeOpenAIWorkflow(RubricJudgeWorkflow):
    """`RubricJudgeWorkflow` whose judge is any OpenAI-compatible service.

    `workflow_args`: ``judge_model_name``, and the names of the environment variables with its
    URL and key, ``judge_api_base_url_env`` and ``judge_api_key_env``.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {
        "judge_model_name": str,
        "judge_api_base_url_env": str,
        "judge_api_key_env": str,
    }

    def judge(self) -> Judge:
        arguments = self.task.workflow_args
        missing = [n for n in ("judge_model_name",) if n not in arguments]
        if missing:
            raise ValueError("rubric_judge_openai_workflow needs workflow_args.judge_model_name.")
        return ServiceJudge(
            arguments["judge_model_name"],
            arguments.get("judge_api_base_url_env", "OPENAI_BASE_URL"),
            arguments.get("judge_api_key_env", "OPENAI_API_KEY"),
            **arguments.get("judge_args", {}),
        )


def _criterion(item: str | Mapping[str, Any]) -> tuple[str, float]:
    if isinstance(item, str):
        return item, 1.0
    text = item.get("description") or item.get("criterion") or item.get("title")
    if not text:
        raise ValueError(f"A criterion needs a description, but is {dict(item)}.")
    return str(text), float(item.get("weight", 1.0))


def _weighted_share(scores: list[float], weights: list[float]) -> float:
    whole = sum(weight for weight in weights if weight > 0)
    if whole <= 0:
        raise ValueError("A rubric needs a criterion with a weight above 0.")
    got = sum(weight * score for weight, score in zip(weights, scores, strict=True))
    return min(max(got / whole, 0.0), 1.0)
