"""`EnvWorkflow`: the loop between a model and an environment that answers in text."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

from pydantic import PositiveInt

from trinity.common.experience import Experience
from trinity.common.workflows import MultiTurnWorkflow
from trinity.utils.threads import shared_threads

T = TypeVar("T")
Messages = list[dict[str, Any]]


@dataclass
class Outcome:
    """What an environment says to a reply.

    Args:
        text: Shown to the model, if the episode goes on.
        reward: Added to the reward of the episode.
        metrics: Kept; later values replace earlier ones.
    """

    text: str
    reward: float = 0.0
    is_done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


class EnvWorkflow(MultiTurnWorkflow):
    """An episode: the environment speaks, the model replies, until it is done.

    A subclass writes `begin` and `act`, plain or async. The whole episode becomes one experience,
    with every reply trained on; with ``workflow_args.step_wise`` each reply becomes one
    (`eid.step`), and all carry the reward of the episode.

    ``workflow_args.max_turns`` bounds the replies. An episode whose prompt grows too long ends
    there, with the reward it has.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {"max_turns": PositiveInt, "step_wise": bool}
    is_async: ClassVar[bool] = True
    #: Whether `begin`, `act` and `end` take long, and so need a thread.
    is_blocking: ClassVar[bool] = False
    #: Replies at most, if `workflow_args` do not say.
    default_max_turns: ClassVar[int] = 10

    def begin(self) -> Messages | Awaitable[Messages]:
        """Start the episode; the conversation before the first reply."""
        raise NotImplementedError

    def act(self, reply: str) -> Outcome | Awaitable[Outcome]:
        """What the environment does upon a reply."""
        raise NotImplementedError

    def end(self) -> None:
        """Free what `begin` has taken."""

    @property
    def max_turns(self) -> int:
        return int(self.task.workflow_args.get("max_turns", self.default_max_turns))

    async def run_async(self) -> list[Experience]:
        try:
            return await self._episode(await self._call(self.begin))
        finally:
            await self._call(self.end)

    async def _episode(self, messages: Messages) -> list[Experience]:
        replies: list[Experience] = []
        reward = 0.0
        metrics: dict[str, float] = {}
        for step in range(self.max_turns):
            [reply] = await self.model.chat_async(messages, n=1, **self.rollout_args)
            if reply.truncate_status == "prompt_truncated":
                replies = replies or [reply]
                break
            reply.eid.step = step
            replies.append(reply)
            messages.append({"role": "assistant", "content": reply.response_text})
            outcome = await self._call(partial(self.act, reply.response_text or ""))
            reward += outcome.reward
            metrics |= outcome.metrics
            if outcome.is_done:
                break
            messages.append({"role": "user", "content": outcome.text})
        metrics["env_steps"] = float(len(replies))
        return await self._experiences(messages, replies, reward, metrics)

    async def _experiences(
        self,
        messages: Messages,
        replies: list[Experience],
        reward: float,
        metrics: dict[str, float],
    ) -> list[Experience]:
        is_masked = replies[0].truncate_status == "prompt_truncated"
        if self.task.workflow_args.get("step_wise", False) or is_masked:
            for reply in replies:
                reply.reward, reply.metrics = reward, reply.metrics | metrics
            return replies
        while messages[-1]["role"] != "assistant":
            messages.pop()
        experience = await self.process_messages_to_experience_async(messages, reward)
        experience.metrics |= metrics
        experience.response_text = experience.response_text or replies[-1].response_text
        return [experience]

    async def _call(self, work: Callable[[], T | Awaitable[T]]) -> T:
        result = await shared_threads().run(work) if self.is_blocking else work()
        return await result if inspect.isawaitable(result) else cast(T, result)
