"""`frozen_lake_workflow`: cross the ice to the goal without falling into a hole."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from trinity.common.extras import needed
from trinity.workflows.envs.base import EnvWorkflow, Messages, Outcome

_MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
_ACTION = re.compile(r"(?i)\b(left|down|right|up)\b")
_BLOCK = re.compile(r"```\s*(.*?)\s*```|<action>\s*(.*?)\s*</action>", re.S)
_RULES = """\
You walk on a frozen lake. P is you, _ is ice, O is a hole, G is the goal. Reach the goal; a step \
into a hole ends the game. Think first, then give one move inside triple backticks: ```Up```, \
```Down```, ```Left``` or ```Right```."""
_SLIPPERY = " The ice is slippery: you may slide to the side of where you want to go."


class FrozenLakeWorkflow(EnvWorkflow):
    """Reward 1 for reaching the goal.

    The row holds ``size``, ``p`` (share of ice) and ``seed`` of the map. `workflow_args`:
    ``env_max_steps`` moves on the ice (8), ``agent_max_steps`` replies (10), ``is_slippery``
    (False), ``desc`` (rows of ``SFHG``, in place of a random map). Metrics: ``success``,
    ``env_moves``, ``invalid_replies``.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {
        "env_max_steps": int,
        "agent_max_steps": int,
        "is_slippery": bool,
        "desc": Any,
    }

    def begin(self) -> Messages:
        arguments = self.task.workflow_args
        is_slippery = bool(arguments.get("is_slippery", False))
        self._max_moves = int(arguments.get("env_max_steps", 8))
        self._num_moves = self._num_invalid = 0
        row = self.task.raw_task
        self._map = arguments.get("desc") or random_map(
            int(row.get("size", 4)), float(row.get("p", 0.8)), int(row.get("seed", 0))
        )
        self._env = _gymnasium().make(
            "FrozenLake-v1", desc=self._map, is_slippery=is_slippery, max_episode_steps=10_000
        )
        self._place, _ = self._env.reset(seed=int(row.get("seed", 0)))
        rules = _RULES + (_SLIPPERY if is_slippery else "")
        return [
            {"role": "system", "content": rules},
            {"role": "user", "content": f"The lake:\n{self._drawn()}"},
        ]

    @property
    def max_turns(self) -> int:
        return int(self.task.workflow_args.get("agent_max_steps", 10))

    def act(self, reply: str) -> Outcome:
        move = move_in(reply)
        if move is None:
            self._num_invalid += 1
            text = "That is no move. Give one of Up, Down, Left, Right inside triple backticks."
            return Outcome(text, metrics=self._metrics(0))
        self._num_moves += 1
        self._place, reward, is_over, _, _ = self._env.step(_MOVES[move])
        is_done = is_over or self._num_moves >= self._max_moves
        text = f"The lake now:\n{self._drawn()}"
        return Outcome(text, float(reward), is_done, self._metrics(float(reward)))

    def end(self) -> None:
        if hasattr(self, "_env"):
            self._env.close()

    def _drawn(self) -> str:
        width = len(self._map[0])
        cells = [{"S": "_", "F": "_", "H": "O", "G": "G"}[c] for row in self._map for c in row]
        cells[int(self._place)] = "P"
        return "\n".join(
            " ".join(cells[start : start + width]) for start in range(0, len(cells), width)
        )

    def _metrics(self, reward: float) -> dict[str, float]:
        return {
            "success": float(reward > 0),
            "env_moves": float(self._num_moves),
            "invalid_replies": float(self._num_invalid),
        }


def move_in(reply: str) -> str | None:
    """The move of a reply: in its last block of backticks or action tags; None without one."""
    blocks = [first or second for first, second in _BLOCK.findall(reply)]
    moves = _ACTION.findall(blocks[-1]) if blocks else []
    return moves[0].lower() if len(moves) == 1 else None


def random_map(size: int, ice: float, seed: int) -> list[str]:
    """A map with a way from start to goal."""
    _gymnasium()
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    rows: list[str] = generate_random_map(size=size, p=ice, seed=seed)
    return rows


def _gymnasium() -> Any:
    return needed("gymnasium", "gym", "frozen_lake_workflow")
