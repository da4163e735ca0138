"""Workflows in steps: each reply of each step is an experience of its own.

They need `explorer.rollout_model.enable_history: true`, which records every reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PositiveInt

from trinity.common.workflows.workflow import Workflow, defined_at
from trinity.utils.threads import run_sync

if TYPE_CHECKING:
    from trinity.common.experience import Experience
    from trinity.common.models import ModelWrapper
    from trinity.common.workflows.task import Task


class _Steps(Workflow):
    """A run of up to ``max_step_num`` steps. A subclass writes `step` or `step_async`.

    Args:
        use_openai_client: Offer ``self.client``, an OpenAI client of the model.
    """

    is_async: ClassVar[bool] = False
    needs_history: ClassVar[bool] = True
    argument_types: ClassVar[Mapping[str, Any]] = {"max_step_num": PositiveInt}

    def __init__(
        self,
        *,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: list[ModelWrapper] | None = None,
        use_openai_client: bool = True,
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self._use_openai_client = use_openai_client
        self._client: Any = None

    @property
    def client(self) -> Any:
        """OpenAI client of the model: an async one if the steps are async."""
        if not self._use_openai_client:
            raise ValueError(f"{type(self).__qualname__} was made with use_openai_client=False.")
        if self._client is None:
            is_async = type(self).runs_async()
            model = self.model
            self._client = (
                model.get_openai_async_client() if is_async else model.get_openai_client()
            )
        return self._client

    @property
    def max_step_num(self) -> int:
        """Steps at most; `workflow_args.max_step_num` unless a subclass says otherwise."""
        return int(self.task.workflow_args.get("max_step_num", 10))

    def step(self, step_num: int) -> bool:
        """Do step ``step_num``; whether to go on."""
        raise NotImplementedError(f"{type(self).__qualname__} has neither step nor step_async.")

    async def step_async(self, step_num: int) -> bool:
        """Do step ``step_num``; whether to go on."""
        return self.step(step_num)

    @classmethod
    def runs_async(cls) -> bool:
        return defined_at(cls, "step_async") < defined_at(cls, "step") or cls.is_async

    def run(self) -> list[Experience]:
        return run_sync(self.run_async())

    async def _take(self, step_num: int) -> tuple[list[Experience], bool]:
        """Replies of a step, numbered; and whether to go on."""
        goes_on = await self.step_async(step_num)
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.eid.step = step_num
        return experiences, goes_on


class StepWiseRewardWorkflow(_Steps):
    """Each step is scored by itself: write `step` and `reward`, or their async forms."""

    def reward(self, exps: list[Experience], step_num: int) -> float:
        """Reward of step ``step_num``, whose replies are ``exps``."""
        raise NotImplementedError(f"{type(self).__qualname__} has no reward.")

    async def reward_async(self, exps: list[Experience], step_num: int) -> float:
        """Reward of step ``step_num``, whose replies are ``exps``."""
        return self.reward(exps, step_num)

    async def run_async(self) -> list[Experience]:
        experiences: list[Experience] = []
        for step_num in range(self.max_step_num):
            replies, goes_on = await self._take(step_num)
            reward = float(await self.reward_async(replies, step_num))
            for reply in replies:
                reply.reward = reward
            experiences += replies
            if not goes_on:
                break
        return _with_steps(experiences, step_num + 1)


class RewardPropagationWorkflow(_Steps):
    """The whole run is scored at its end, and every step gets that reward."""

    def reward(self, exps: list[Experience]) -> float:
        """Reward of the run, whose replies are ``exps``."""
        raise NotImplementedError(f"{type(self).__qualname__} has no reward.")

    async def reward_async(self, exps: list[Experience]) -> float:
        """Reward of the run, whose replies are ``exps``."""
        return self.reward(exps)

    async def run_async(self) -> list[Experience]:
        experiences: list[Experience] = []
        for step_num in range(self.max_step_num):
            replies, goes_on = await self._take(step_num)
            experiences += replies
            if not goes_on:
                break
        reward = float(await self.reward_async(experiences))
        for experience in experiences:
            experience.reward = reward
        return _with_steps(experiences, step_num + 1)


def _with_steps(experiences: Sequence[Experience], num_steps: int) -> list[Experience]:
    for experience in experiences:
        experience.metrics["actual_env_steps"] = float(num_steps)
    return list(experiences)
