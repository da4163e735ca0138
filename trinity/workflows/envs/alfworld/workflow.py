"""`alfworld_workflow`: household tasks of ALFWorld (arXiv:2010.03768)."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from trinity.common.errors import NotSetUpError
from trinity.common.workflows import Task
from trinity.workflows.envs.text_game import TextGame, TextGameWorkflow

_HOW = (
    "alfworld_workflow needs ALFWorld: pip install alfworld, then alfworld-download, which puts "
    "the games into ~/.cache/alfworld (or $ALFWORLD_DATA)."
)


class AlfworldWorkflow(TextGameWorkflow):
    """One game; the row's ``game_file`` (or the prompt column) is the path of a ``game.tw-pddl``,
    absolute or below ``$ALFWORLD_DATA``. Reward 1 for a game that is won.
    """

    rules: ClassVar[str] = (
        "You are in a house and have a task. In each turn think first, then write one of the "
        "admissible commands inside <action> and </action>."
    )

    def open_game(self) -> TextGame:
        return _Game(_game_file(self.task), self.max_turns)


class StepWiseAlfworldWorkflow(AlfworldWorkflow):
    """`AlfworldWorkflow` with an experience for each turn."""

    def __init__(self, *, task: Task, **kwargs: Any) -> None:
        super().__init__(task=_with(task, step_wise=True), **kwargs)


class ReflectAlfworldWorkflow(AlfworldWorkflow):
    """`AlfworldWorkflow` with a second try after a failure, and a reflection before it."""

    def __init__(self, *, task: Task, **kwargs: Any) -> None:
        super().__init__(task=_with(task, reflect=True), **kwargs)


def _with(task: Task, **arguments: object) -> Task:
    return replace(task, workflow_args={**arguments, **task.workflow_args})


def _game_file(task: Task) -> Path:
    name = task.raw_task.get("game_file") or task.task_desc
    if not name:
        raise ValueError("alfworld_workflow needs the column game_file.")
    root = Path(os.environ.get("ALFWORLD_DATA", "~/.cache/alfworld")).expanduser()
    if not root.is_dir():
        raise NotSetUpError(f"There is no folder {root}. {_HOW}")
    path = root / str(name)
    if not path.is_file():
        raise ValueError(f"There is no game {path}. {_HOW}")
    return path


class _Game:
    def __init__(self, path: Path, max_steps: int) -> None:
        try:
            import textworld
            import textworld.gym
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        except ImportError as error:
            raise NotSetUpError(_HOW) from error
        wanted = textworld.EnvInfos(won=True, admissible_commands=True)
        name = textworld.gym.register_game(
            str(path), wanted, max_episode_steps=max_steps, wrappers=[AlfredDemangler()]
        )
        self._env = textworld.gym.make(name)

    def reset(self) -> str:
        text, infos = self._env.reset()
        return _shown(text, infos)

    def step(self, command: str) -> tuple[str, float, bool]:
        text, _, is_done, infos = self._env.step(command)
        return _shown(text, infos), float(bool(infos.get("won"))), bool(is_done)

    def close(self) -> None:
        self._env.close()


def _shown(text: str, infos: dict[str, Any]) -> str:
    commands = [c for c in infos.get("admissible_commands") or [] if c not in ("help", "look")]
    return f"{text.strip()}\n\nAdmissible commands: {', '.join(commands)}"
