"""A model without a chat template is refused where a workflow chats with it."""

import json
from pathlib import Path

import pytest

from tests.common.models.toy import model_folder
from trinity.common.config import Config
from trinity.common.workflows import SimpleWorkflow, Workflow
from trinity.launcher.check_chat import chat_problems
from trinity.launcher.plan import make_plan


class Generates(Workflow):
    async def run_async(self) -> list:
        return await self.model.generate_async(["1 + 1 ="])


class Plain(SimpleWorkflow):
    default_reward_fn = "exact_match_reward"


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    folder = Path(model_folder(tmp_path / "model"))
    for template in folder.glob("chat_template*"):
        template.unlink()
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings.pop("chat_template", None)
    file.write_text(json.dumps(settings))
    return folder


def problems(folder: Path, workflow: str, **sections: object) -> list[str]:
    taskset = {"path": "rows.jsonl", "default_workflow_type": workflow}
    config = {
        "mode": "explore",
        "checkpoint_root_dir": str(folder / "jobs"),
        "model": {"model_path": str(folder), "max_model_len": 64},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
        "buffer": {"batch_size": 2, "explorer_input": {"taskset": taskset}},
        "explorer": {"rollout_model": {"engine_type": "torch"}},
    }
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    plan = make_plan(Config.model_validate(config), found_gpus=0)
    return [problem.message for problem in chat_problems(plan.config)]


@pytest.mark.parametrize("workflow", ["math_workflow", f"{__name__}.Plain"])
def test_a_workflow_that_chats_needs_a_template(bare: Path, workflow: str) -> None:
    expected = f"The model has no chat template, and {workflow} chats with it."
    assert problems(bare, workflow) == [expected]


def test_one_that_generates_needs_none(bare: Path) -> None:
    assert problems(bare, f"{__name__}.Generates") == []


def test_a_template_may_come_from_the_configuration_or_the_folder(bare: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert problems(bare, "math_workflow", model={"custom_chat_template": template}) == []
    (bare / "chat_template.jinja").write_text(template)
    assert problems(bare, "math_workflow") == []
    (bare / "chat_template.jinja").rename(bare / "mine.jinja")
    path = str(bare / "mine.jinja")
    assert problems(bare, "math_workflow", model={"chat_template_path": path}) == []
