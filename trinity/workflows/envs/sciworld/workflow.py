"""`sciworld_workflow`: experiments of ScienceWorld (arXiv:2203.07540)."""

import shutil
from typing import ClassVar

from trinity.common.errors import NotSetUpError
from trinity.workflows.envs.text_game import TextGame, TextGameWorkflow

_HOW = (
    "sciworld_workflow needs ScienceWorld and Java: pip install scienceworld, and a Java runtime "
    "of version 8 or newer on the PATH."
)


class SciWorldWorkflow(TextGameWorkflow):
    """One experiment; the row holds ``task_name`` and ``variation`` (and perhaps
    ``simplification``, "easy"). Reward: ScienceWorld's score, from 0 to 1.
    """

    rules: ClassVar[str] = (
        "You do an experiment in a small world. In each turn think first, then write one command "
        "inside <action> and </action>. The command `help` lists what you can do."
    )

    def open_game(self) -> TextGame:
        row = self.task.raw_task
        if "task_name" not in row:
            raise ValueError("sciworld_workflow needs the column task_name.")
        simplification = str(row.get("simplification", "easy"))
        variation = int(row.get("variation", 0))
        return _Game(str(row["task_name"]), variation, simplification, self.max_turns)


class _Game:
    def __init__(self, name: str, variation: int, simplification: str, max_steps: int) -> None:
        try:
            from scienceworld import ScienceWorldEnv
        except ImportError as error:
            raise NotSetUpError(_HOW) from error
        if shutil.which("java") is None:
            raise NotSetUpError(_HOW)
        self._env = ScienceWorldEnv("", envStepLimit=max_steps)
        self._env.load(name, variation, simplification)

    def reset(self) -> str:
        text, infos = self._env.reset()
        return f"{infos.get('taskDesc') or self._env.get_task_description()}\n\n{text}"

    def step(self, command: str) -> tuple[str, float, bool]:
        text, _, is_done, infos = self._env.step(command)
        return text, max(float(infos["score"]) / 100, 0.0), bool(is_done)

    def close(self) -> None:
        self._env.close()
