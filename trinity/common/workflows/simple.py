"""One question, some answers, a reward for each: `SimpleWorkflow`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from trinity.common.rewards import RewardFn, Scorer, make_scorer
from trinity.common.workflows.task import Task
from trinity.common.workflows.workflow import Workflow

if TYPE_CHECKING:
    from trinity.common.experience import Experience
    from trinity.common.models import ModelWrapper

Messages = list[dict[str, Any]]

#: Key of `Experience.info` that says why a sample has no reward; such samples are left out.
REWARD_ERROR = "reward_error"


class BaseSimpleWorkflow(Workflow):
    """A workflow of tasks with a prompt, perhaps a right answer, and a reward.

    Attributes (of the task at hand):
        task_desc, truth: Prompt and right answer of the row.
        system_prompt, reply_prefix: Of the task's format; the row's own system prompt wins.
        reward_fn: The reward, to be called directly; `score` calls it with its policy.
    """

    can_reset: ClassVar[bool] = True

    #: Reward of tasks that name none.
    default_reward_fn: ClassVar[str | type[RewardFn] | None] = None
    #: System prompt of tasks that have none.
    default_system_prompt: ClassVar[str | None] = None

    def __init__(
        self,
        *,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: list[ModelWrapper] | None = None,
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        self.task = task
        self.format_args = task.format_args
        self.raw_task = task.raw_task
        self.task_desc = task.task_desc
        self.truth = task.truth
        own_prompt = task.column(task.format_args.system_prompt_key)
        self.system_prompt: str | None = (
            own_prompt or task.format_args.system_prompt or self.default_system_prompt
        )
        self.reply_prefix = task.format_args.reply_prefix
        self.reward_fn_args = task.reward_fn_args
        self.scorer = self._make_scorer()

    @property
    def reward_fn(self) -> Any:
        if self.scorer is None:
            raise ValueError(self._no_reward())
        return self.scorer.reward_fn

    def format_messages(self) -> Messages:
        """System prompt (if any), the task, and the reply prefix (if any).

        A prompt column that holds messages is taken as it is; its own system prompt wins.
        """
        asked = self.task_desc
        messages: Messages = (
            [dict(message) for message in asked]
            if isinstance(asked, list)
            else [{"role": "user", "content": asked}]
        )
        if self.system_prompt and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        if self.reply_prefix:
            messages.append({"role": "assistant", "content": self.reply_prefix})
        return messages

    async def score(
        self, experiences: Experience | Sequence[Experience], messages: Messages, **more: object
    ) -> None:
        """Give each experience its reward, or note in its info why it has none.

        A stand-in for a prompt that was too long has no response; its reward stays 0.

        Args:
            messages: What the responses answer.
            more: Further or other arguments for the reward, by name.

        Raises:
            RewardError: The reward failed and its policy is ``on_error: raise``.
        """
        if self.scorer is None:
            raise ValueError(self._no_reward())
        if not isinstance(experiences, Sequence):
            experiences = [experiences]
        experiences = [e for e in experiences if e.truncate_status != "prompt_truncated"]
        seen = [self._seen_by_reward(experience, messages) | more for experience in experiences]
        for experience, outcome in zip(experiences, await self.scorer.score_all(seen), strict=True):
            if isinstance(outcome, dict):
                experience.reward = sum(outcome.values())
                experience.metrics |= outcome
            elif outcome.is_fatal:
                raise outcome
            else:
                experience.reward, experience.info[REWARD_ERROR] = None, str(outcome)

    async def score_last(
        self, replies: Sequence[Experience], messages: Messages, **more: object
    ) -> None:
        """`score` the last of the replies of a run: all carry its reward, and its parts as metrics.

        Args:
            messages, more: As in `score`.
        """
        last = replies[-1]
        own = set(last.metrics)
        await self.score(last, messages, **more)
        parts = {name: value for name, value in last.metrics.items() if name not in own}
        for reply in replies[:-1]:
            reply.reward = last.reward
            reply.metrics |= parts
            if REWARD_ERROR in last.info:
                reply.info[REWARD_ERROR] = last.info[REWARD_ERROR]

    def _seen_by_reward(self, experience: Experience, messages: Messages) -> dict[str, object]:
        tokens = experience.tokens[experience.prompt_length :]
        return {
            "response": experience.response_text,
            "truth": self.truth,
            "ground_truth": self.truth,
            "prompt": self.task_desc,
            "messages": messages,
            "tokens": tokens,
            "response_token": tokens,
            "truncation": experience.truncate_status,
            "truncate_status": experience.truncate_status,
            "task": self.task,
            "metadata": self.raw_task,
            "raw_task": self.raw_task,
            "experience": experience,
        }

    def _no_reward(self) -> str:
        return (
            f"{type(self).__qualname__} needs a reward: set default_reward_fn_type of the "
            "taskset, or format.reward_fn_key to the column that names one."
        )

    def _make_scorer(self) -> Scorer | None:
        reward_fn = self.task.reward_fn or self.default_reward_fn
        return make_scorer(reward_fn, self.reward_fn_args) if reward_fn else None


class SimpleWorkflow(BaseSimpleWorkflow):
    """Ask once, score each of the ``repeat_times`` answers."""

    can_repeat: ClassVar[bool] = True
    is_async: ClassVar[bool] = True

    async def run_async(self) -> list[Experience]:
        messages = self.format_messages()
        answers = await self.sample_answers(messages)
        await self.score(answers, messages)
        return answers

    async def sample_answers(self, messages: Messages, **more: Any) -> list[Experience]:
        """One answer for each of the ``repeat_times`` runs; ``more`` goes to ``model.chat``."""
        asked = {**self.rollout_args, **more}
        return self.with_run_ids(
            await self.model.chat_async(messages, n=self.repeat_times, **asked)
        )

    def with_run_ids(self, answers: list[Experience]) -> list[Experience]:
        """``answers``, each with the number of its run."""
        for index, answer in enumerate(answers):
            answer.eid.run = self.run_id_base + index
        return answers
