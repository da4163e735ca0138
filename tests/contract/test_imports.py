"""The documented import paths work in a fresh process, and importing the config stays light."""

import subprocess
import sys

import pytest

DOCUMENTED = {
    "trinity.common.config": ["Config", "load_config"],
    "trinity.common.experience": ["EID", "Experience", "CustomField"],
    "trinity.common.workflows": [
        "WORKFLOWS",
        "Workflow",
        "SimpleWorkflow",
        "MultiTurnWorkflow",
        "Task",
    ],
    "trinity.common.rewards": ["REWARD_FUNCTIONS", "RewardFn"],
    "trinity.common.models": ["ModelWrapper"],
    "trinity.common.models.utils": ["load_fsdp_state_dict_from_verl_checkpoint"],
    "trinity.common.schema.sql_schema": ["ExperienceModel", "TaskModel"],
    "trinity.common.constants": ["SyncMethod", "SyncStyle", "StorageType"],
    "trinity.algorithm": [
        "ADVANTAGE_FN",
        "ALGORITHM_TYPE",
        "ENTROPY_LOSS_FN",
        "KL_FN",
        "POLICY_LOSS_FN",
        "SAMPLE_STRATEGY",
    ],
    "trinity.buffer.operators": ["EXPERIENCE_OPERATORS", "ExperienceOperator"],
    "trinity.manager.config_registry": ["CONFIG_GENERATORS"],
    "trinity.utils.log": ["get_logger"],
    "trinity.utils.monitor": ["MONITOR", "Monitor"],
}

HEAVY = ("torch", "ray", "vllm", "transformers", "datasets", "verl", "streamlit", "sqlalchemy")


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", DOCUMENTED)
def test_documented_names_import_in_a_fresh_process(module: str):
    names = ", ".join(DOCUMENTED[module])
    fresh(f"from {module} import {names}")


def test_importing_the_config_loads_nothing_heavy():
    found = fresh(
        "import sys, trinity.common.config; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert found.strip() == "[]"


def test_tasks_are_opened_and_workflows_written_without_torch():
    found = fresh(
        "import sys, trinity.common.workflows, trinity.buffer.task_scheduler\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert found.strip() == "[]"


def test_what_refuses_a_run_loads_no_torch():
    found = fresh("import sys, trinity.launcher.launch; print('torch' in sys.modules)")
    assert found.strip() == "False"


def test_the_command_line_shows_its_help_without_torch():
    found = fresh(
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from trinity.cli.launcher import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert found.strip() == "[]"
