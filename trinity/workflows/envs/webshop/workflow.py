"""`webshop_workflow`: shopping in WebShop (arXiv:2207.01206)."""

import os
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import PositiveInt

from trinity.common.errors import NotSetUpError
from trinity.workflows.envs.text_game import TextGame, TextGameWorkflow

_HOW = (
    "webshop_workflow needs WebShop: clone https://github.com/princeton-nlp/WebShop, run its "
    "./setup.sh -d small, and set WEBSHOP_PATH to the folder."
)


class WebShopWorkflow(TextGameWorkflow):
    """One purchase; the row's ``session`` (or ``task_id``) picks the order. `workflow_args`:
    ``num_products`` (1000). Reward: WebShop's own, from 0 to 1.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {"num_products": PositiveInt}
    default_max_turns: ClassVar[int] = 15
    rules: ClassVar[str] = (
        "You shop for what the instruction asks for. In each turn think first, then write one "
        "command inside <action> and </action>: search[words] or click[button]."
    )

    def open_game(self) -> TextGame:
        row = self.task.raw_task
        session = row.get("session", row.get("task_id", 0))
        return _Game(int(session), int(self.task.workflow_args.get("num_products", 1000)))


class _Game:
    def __init__(self, session: int, num_products: int) -> None:
        folder = os.environ.get("WEBSHOP_PATH")
        if folder and folder not in sys.path:
            sys.path.append(folder)
        try:
            from web_agent_site.envs import WebAgentTextEnv
        except ImportError as error:
            raise NotSetUpError(_HOW) from error
        self._session = session
        self._env = WebAgentTextEnv(observation_mode="text", num_products=num_products)

    def reset(self) -> str:
        text, _ = self._env.reset(session=self._session)
        return self._shown(text)

    def step(self, command: str) -> tuple[str, float, bool]:
        text, reward, is_done, _ = self._env.step(command)
        return self._shown(text), float(reward), bool(is_done)

    def close(self) -> None:
        self._env.close()

    def _shown(self, text: str) -> str:
        possible = self._env.get_available_actions()
        buttons = ", ".join(map(str, possible.get("clickables", [])))
        search = "search[words], " if possible.get("has_search_bar") else ""
        return f"{text}\n\nYou may: {search}click one of: {buttons}"
