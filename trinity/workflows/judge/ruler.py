"""RULER: a judge ranks the responses of a group, and the ranks are the rewards."""

from collections.abc import Mapping
from typing import Any, ClassVar

from trinity.common.experience import Experience
from trinity.common.workflows import REWARD_ERROR
from trinity.workflows.judge.judge import (
    RULE_OF_FENCES,
    Judge,
    Messages,
    ModelJudge,
    begun,
    fenced,
    judged,
    scores_in,
    texts_of,
)
from trinity.workflows.math.math import MathWorkflow

_JUDGE = f"""\
You compare several responses to the same question. Give each a score between 0 and 1: a right \
answer scores above every wrong one; among right ones, clearer and shorter reasoning scores \
higher; the same quality gets the same score. {RULE_OF_FENCES}
Answer with JSON alone: {{"scores": [score of response 1, score of response 2, ...]}}"""


class MathRulerWorkflow(MathWorkflow):
    """`math_workflow` whose reward is a judge's ranking of the group.

    The judge is the first auxiliary model (``explorer.auxiliary_models``). It sees the question,
    all responses, and with ``workflow_args.show_truth`` the right answer; it is sampled as
    ``judge_args`` say, among them ``prefix``, the beginning of its answer. A judge that gives no
    scores is asked again as `reward_fn_args` say (``on_error``, ``max_retries``); after that the
    group is left out. Metrics: ``ruler_score``, and ``gold_accuracy`` by `math_reward`, which is
    not trained on.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {
        "show_truth": bool,
        "judge_args": Mapping[str, Any],
    }
    can_repeat: ClassVar[bool] = True

    async def run_async(self) -> list[Experience]:
        messages = self.format_messages()
        answers = await self.sample_answers(messages)
        await self._rank(answers)
        await self.score(answers, messages)
        for answer in answers:
            _trade_reward(answer)
        return answers

    async def _rank(self, answers: list[Experience]) -> None:
        question = self.judge_messages(answers)
        scores = await judged(self._judge(), question, len(answers), self.task.reward_fn_args)
        for place, answer in enumerate(answers):
            if isinstance(scores, list):
                answer.metrics["ruler_score"] = scores[place]
            else:
                answer.info[REWARD_ERROR] = f"RULER: {scores}"

    def judge_messages(self, answers: list[Experience]) -> Messages:
        """What the judge is asked about ``answers``."""
        texts = texts_of(answers)
        parts = [fenced("question", self.task_desc)]
        if self.task.workflow_args.get("show_truth", False):
            parts.append(fenced("right answer", str(self.truth)))
        parts += [fenced(f"response {i}", text) for i, text in enumerate(texts, 1)]
        return [
            {"role": "system", "content": _JUDGE},
            {"role": "user", "content": "\n\n".join(parts)},
        ]

    def _judge(self) -> Judge:
        if not self.auxiliary_model_wrappers:
            raise ValueError(
                "math_ruler_workflow needs a judge: name a model in explorer.auxiliary_models."
            )
        return ModelJudge(self.auxiliary_model_wrappers[0], **self._judge_args())

    def _judge_args(self) -> dict[str, Any]:
        return dict(self.task.workflow_args.get("judge_args", {}))


class MathTrainableRulerWorkflow(MathRulerWorkflow):
    """RULER by the model that is trained: it answers, ranks its own answers, and learns both.

    Each of the ``repeat_times`` runs gives one answer and one ranking of all answers. An answer's
    reward is its mean score over the rankings; a ranking's is 1 minus its mean distance from the
    right verdicts (`math_reward`), and 0 if it can't be read. Rankings form a group of their own.
    Of ``workflow_args.judge_args`` only ``prefix`` has a meaning here.
    """

    can_repeat: ClassVar[bool] = True

    async def run_async(self) -> list[Experience]:
        messages = self.format_messages()
        answers = await self.sample_answers(messages)
        await self.score(answers, messages)
        prefix = self._judge_args().pop("prefix", "")
        question = begun(self.judge_messages(answers), prefix)
        rankings = await self.sample_answers(question)
        texts = [prefix + (ranking.response_text or "") for ranking in rankings]
        scores = [_scores_or_none(text, len(answers)) for text in texts]
        for ranking, given in zip(rankings, scores, strict=True):
            ranking.eid.task = f"{self.task.task_id}/ranking"
            ranking.reward = _closeness(given, answers)
            ranking.metrics = {"ranking_reward": ranking.reward, "ranking_read": float(bool(given))}
        readable = [given for given in scores if given]
        for place, answer in enumerate(answers):
            if readable:
                answer.metrics["ruler_score"] = sum(g[place] for g in readable) / len(readable)
            else:
                answer.info[REWARD_ERROR] = "RULER: no ranking could be read"
            _trade_reward(answer)
        return [*answers, *rankings]


def _trade_reward(answer: Experience) -> None:
    """Make the rank the reward; what the reward function says becomes a metric."""
    if "accuracy" in answer.metrics:
        answer.metrics["gold_accuracy"] = answer.metrics.pop("accuracy")
    answer.reward = answer.metrics.get("ruler_score")


def _scores_or_none(text: str, count: int) -> list[float] | None:
    try:
        return scores_in(text, count)
    except (ValueError, TypeError):
        return None


def _closeness(given: list[float] | None, answers: list[Experience]) -> float:
    if given is None:
        return 0.0
    gaps = [abs(g - a.metrics.get("accuracy", 0.0)) for g, a in zip(given, answers, strict=True)]
    return 1.0 - sum(gaps) / len(gaps)
