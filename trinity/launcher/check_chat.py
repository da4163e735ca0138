"""Whether there is a chat template for workflows that chat with the model."""

import json
from collections.abc import Iterator
from pathlib import Path

from trinity.common.config import Config
from trinity.common.constants import EngineType, Mode
from trinity.common.errors import Problem
from trinity.common.workflows import WORKFLOWS, SimpleWorkflow, Workflow
from trinity.utils.registry import UnknownNameError

_TEMPLATES = ("chat_template.*", "additional_chat_templates/*", "tekken.json")
_OWN = "trinity."


def chat_problems(config: Config) -> Iterator[Problem]:
    """The model's folder has no chat template, and someone needs one."""
    model = config.explorer.rollout_model
    folder = Path(model.model_path or config.model.model_path).expanduser()
    if not config.mode.explores or model.engine_type is EngineType.OPENAI or model.chat_template:
        return
    if not (folder / "tokenizer_config.json").is_file() or has_chat_template(folder):
        return
    who = "mode serve" if config.mode is Mode.SERVE else _first_that_chats(config)
    if who:
        yield Problem(
            "model.model_path",
            f"The model has no chat template, and {who} chats with it.",
            "Set model.chat_template_path to a file with one, or take a model that has one "
            "(often called -Instruct or -Chat).",
            config.model.model_path,
        )


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a model's folder brings one, as far as its files tell."""
    if any(path for pattern in _TEMPLATES for path in folder.glob(pattern)):
        return True
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    return bool(settings.get("chat_template") or settings.get("auto_map"))


def _first_that_chats(config: Config) -> str | None:
    inputs = config.buffer.explorer_input
    for taskset in (*inputs.tasksets, *inputs.eval_tasksets):
        if taskset.default_workflow_type and _chats(taskset.default_workflow_type):
            return taskset.default_workflow_type
    return None


def _chats(name: str) -> bool:
    """All that ship with trinity chat; one of a plugin does where it runs as they do."""
    try:
        workflow: type[Workflow] = WORKFLOWS.get(name)
    except (UnknownNameError, ImportError):
        return False  # told by another check
    is_plain = getattr(workflow, "run_async", None) is SimpleWorkflow.run_async
    return workflow.__module__.startswith(_OWN) or (is_plain and workflow.runs_async())
