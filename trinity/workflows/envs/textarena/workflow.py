"""`textarena_workflow`: any game of `textarena`, alone or against a model."""

import random
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import PositiveInt

from trinity.common.extras import needed
from trinity.workflows.envs.base import EnvWorkflow, Messages, Outcome

T = TypeVar("T")

_RULES = "You play a game. Think first if you like; the game reads the move in square brackets."
_ME = 0


class TextArenaWorkflow(EnvWorkflow):
    """One game; the reward is what the game gives its first player.

    The row holds ``env_id`` (such as ``GuessTheNumber-v0``; or `workflow_args.env_id`) and
    ``seed``. `workflow_args`: ``num_players`` (1), ``env_args`` of the game, ``max_turns`` (50).
    Other players are played by the first auxiliary model, else by the model itself; what they say
    is not trained on. Metrics: ``game_reward``, ``invalid_move``, ``game_turns``.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {
        "env_id": str,
        "num_players": PositiveInt,
        "env_args": Mapping[str, Any],
        "system_prompt": str,
    }
    default_max_turns = 50

    async def begin(self) -> Messages:
        row, arguments = self.task.raw_task, self.task.workflow_args
        env_id = row.get("env_id") or arguments.get("env_id")
        if not env_id:
            raise ValueError("textarena_workflow needs env_id, in the row or in workflow_args.")
        self._num_players = int(row.get("num_players", arguments.get("num_players", 1)))
        self._num_turns = 0
        self._random = random.Random(int(row.get("seed", 0))).getstate()
        self._opponents: dict[int, Messages] = {}
        make = _textarena().make
        self._env = self._with_own_random(
            lambda: make(f"{env_id.removesuffix('-raw')}-raw", **arguments.get("env_args", {}))
        )
        seed = int(row.get("seed", 0))
        self._with_own_random(lambda: self._env.reset(num_players=self._num_players, seed=seed))
        await self._let_others_play()
        return [
            {"role": "system", "content": arguments.get("system_prompt", _RULES)},
            {"role": "user", "content": self._seen()},
        ]

    async def act(self, reply: str) -> Outcome:
        is_done = self._step(reply) or await self._let_others_play()
        if not is_done:
            return Outcome(self._seen())
        rewards, infos = self._with_own_random(self._env.close)
        reward = float((rewards or {}).get(_ME, 0.0))
        return Outcome("", reward, True, self._metrics(reward, infos))

    def _step(self, move: str) -> bool:
        self._num_turns += 1
        is_done, _ = self._with_own_random(lambda: self._env.step(action=move))
        return bool(is_done)

    async def _let_others_play(self) -> bool:
        """Moves of the others until it is the model's turn; whether the game is over."""
        while self._env.state.current_player_id != _ME:
            player = self._env.state.current_player_id
            messages = self._opponents.setdefault(player, [])
            messages.append({"role": "user", "content": self._seen()})
            others = self.auxiliary_model_wrappers
            [reply] = await (others[0] if others else self.model).chat_async(messages, n=1)
            messages.append({"role": "assistant", "content": reply.response_text})
            if self._step(reply.response_text or ""):
                return True
        return False

    def _seen(self) -> str:
        """What the player at turn has not read yet."""
        player, observation = self._with_own_random(self._env.get_observation)
        if isinstance(observation, str):
            return observation
        names = self._env.state.role_mapping
        lines = [
            f"[{names.get(sender, sender)}] {text}"
            for sender, text, *_ in observation
            if sender != player
        ]
        return "\n".join(lines) or "It is your turn."

    def _metrics(self, reward: float, infos: dict[int, dict[str, Any]] | None) -> dict[str, float]:
        mine = (infos or {}).get(_ME, {})
        return {
            "game_reward": reward,
            "invalid_move": float(bool(mine.get("invalid_move", False))),
            "game_turns": float(self._num_turns),
        }

    def _with_own_random(self, work: Callable[[], T]) -> T:
        """Games draw from Python's global generator: give each its own, so that games that run
        side by side do not change each other.
        """
        outside = random.getstate()
        random.setstate(self._random)
        try:
            return work()
        finally:
            self._random = random.getstate()
            random.setstate(outside)


def _textarena() -> Any:
    return needed("textarena", "games", "textarena_workflow")
