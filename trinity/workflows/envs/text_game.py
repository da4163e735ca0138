"""`TextGameWorkflow`: worlds of text with one command a turn, such as ALFWorld."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from pydantic import PositiveInt

from trinity.common.experience import Experience
from trinity.workflows.envs.base import EnvWorkflow, Messages, Outcome

_ACTION = re.compile(r"<action>\s*(.*?)\s*</action>", re.S)
_NO_ACTION = "I see no command. Write one inside <action> and </action>."
_REFLECT = (
    "You did not reach the goal. In a few sentences, say what went wrong and what you will do "
    "differently next time."
)


class TextGame(Protocol):
    """A world, in the words of its package."""

    def reset(self) -> str:
        """Start over; what is seen and what is to be done."""
        ...

    def step(self, command: str) -> tuple[str, float, bool]:
        """What is seen, the score so far in 0 .. 1, and whether it is over."""
        ...

    def close(self) -> None: ...


class TextGameWorkflow(EnvWorkflow):
    """An episode in a world of text; the reward is its score at the end, 0 to 1.

    A subclass writes `open_game` and `rules`. `workflow_args`: ``max_env_steps`` (or
    ``max_turns``), ``step_wise``;
    ``reflect`` gives a failed episode a second try, after the model has said what went wrong (the
    first try is then not trained on). Metrics: ``score``, ``won``, ``env_steps``,
    ``missing_actions``.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {"max_env_steps": PositiveInt, "reflect": bool}
    is_blocking: ClassVar[bool] = True
    default_max_turns: ClassVar[int] = 30
    rules: ClassVar[str] = ""

    def open_game(self) -> TextGame:
        """The world of this task.

        Raises:
            NotSetUpError: Its package or data is not there.
        """
        raise NotImplementedError

    @property
    def max_turns(self) -> int:
        return int(self.task.workflow_args.get("max_env_steps", super().max_turns))

    def begin(self) -> Messages:
        self._score, self._num_missing = 0.0, 0
        self._game = self.open_game()
        return [
            {"role": "system", "content": self.rules},
            {"role": "user", "content": self._game.reset()},
        ]

    def act(self, reply: str) -> Outcome:
        commands = _ACTION.findall(reply)
        if not commands:
            self._num_missing += 1
            return Outcome(_NO_ACTION, metrics=self._metrics())
        before = self._score
        text, self._score, is_done = self._game.step(commands[-1])
        return Outcome(text, self._score - before, is_done, self._metrics())

    def end(self) -> None:
        if hasattr(self, "_game"):
            self._game.close()

    async def run_async(self) -> list[Experience]:
        first = await super().run_async()
        if self._score >= 1 or not self.task.workflow_args.get("reflect", False):
            return first
        try:
            asked = await self._with_reflection(await self._call(self.begin), first)
            return first if asked is None else await self._episode(asked)
        finally:
            await self._call(self.end)

    async def _with_reflection(
        self, messages: Messages, first: list[Experience]
    ) -> Messages | None:
        """What the second try begins with; None if the first is too long to be thought of."""
        said = "\n".join(reply.response_text or "" for reply in first)
        asked = [*messages, {"role": "assistant", "content": said}]
        asked.append({"role": "user", "content": _REFLECT})
        [thought] = await self.model.chat_async(asked, n=1, **self.rollout_args)
        if thought.truncate_status == "prompt_truncated":
            return None
        note = f"{messages[1]['content']}\n\nYou tried before, and noted:\n{thought.response_text}"
        return [messages[0], {"role": "user", "content": note}]

    def _metrics(self) -> dict[str, float]:
        return {
            "score": self._score,
            "won": float(self._score >= 1),
            "missing_actions": float(self._num_missing),
        }
