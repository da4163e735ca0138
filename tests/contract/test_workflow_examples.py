"""Every workflow that has a name has an example that names it, and its files hold together."""

import json
from pathlib import Path

import pytest

from trinity.common.config import derive, load_config
from trinity.common.config.buffer import TasksetConfig
from trinity.common.config.validate import validate_file
from trinity.common.constants import StorageType
from trinity.common.workflows import WORKFLOWS
from trinity.common.workflows.names import _OLD_NAMES

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples").glob("*/*.yaml"))
BY_STORAGE = {
    StorageType.VERIFIERS: "verifiers_workflow",
    StorageType.REASONING_GYM: "reasoning_gym_workflow",
}
_PROMISED = """
simple_workflow async_simple_workflow math_workflow async_math_workflow math_boxed_workflow
async_math_boxed_workflow math_eval_workflow async_math_eval_workflow math_rm_workflow
async_math_rm_workflow tool_call_workflow toolcall_workflow agentscope_workflow_adapter
agentscope_workflow_adapter_v1 agentscope_react_workflow as_react_workflow
agentscope_react_math_workflow agentscopev0_react_math_workflow
agentscope_v1_react_search_workflow email_search_workflow alfworld_workflow
RAFT_alfworld_workflow RAFT_reflect_alfworld_workflow step_wise_alfworld_workflow
frozen_lake_workflow sciworld_workflow webshop_workflow intercode_sql_workflow
math_ruler_workflow async_math_ruler_workflow math_trainable_ruler_workflow
rubric_judge_workflow rubric_judge_openai_workflow simple_mm_workflow async_simple_mm_workflow
on_policy_distill_workflow on_policy_distill_math_workflow sudoku_workflow
"""
PROMISED = _PROMISED.split()
"""What the reference promises, old spellings and all."""


def tasksets(file: Path) -> list[TasksetConfig]:
    config = load_config(file, ("model.model_path=x",))
    inputs = derive(config).config.buffer.explorer_input
    return [*inputs.tasksets, *inputs.eval_tasksets]


def workflow_of(taskset: TasksetConfig) -> str | None:
    return taskset.default_workflow_type or BY_STORAGE.get(taskset.storage_type)


EXAMPLES: dict[str | None, list[Path]] = {}
for _file in FILES:
    for _taskset in tasksets(_file):
        EXAMPLES.setdefault(workflow_of(_taskset), []).append(_file)


def is_valid(file: Path) -> bool:
    plugins = [file.parent / "plugins"] if (file.parent / "plugins").is_dir() else []
    return not validate_file(file, ("model.model_path=x",), plugins).problems


@pytest.mark.parametrize("name", PROMISED)
def test_promised_names_resolve(name: str) -> None:
    assert issubclass(WORKFLOWS.get(name), object)


@pytest.mark.parametrize("name", sorted(WORKFLOWS._builtins))  # other tests add theirs
def test_a_workflow_has_an_example_that_validates(name: str) -> None:
    files = EXAMPLES.get(_OLD_NAMES.get(name, name), [])
    assert files, f"examples/ has no configuration with {name}"
    assert any(is_valid(file) and (file.parent / "README.md").is_file() for file in files)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_its_rows_are_there(file: Path) -> None:
    """Tasks in the repository are JSON lines and hold the columns that the taskset names."""
    for taskset in tasksets(file):
        rows = ROOT / taskset.path
        if not taskset.path.startswith("examples/") or rows.suffix != ".jsonl" or "data/" in (
            taskset.path
        ):  # fmt: skip
            continue
        for line in rows.read_text().splitlines():
            row = json.loads(line)
            given = taskset.format.model_fields_set & {"prompt_key", "response_key", "tools_key"}
            assert {getattr(taskset.format, key) for key in given} <= set(row)
