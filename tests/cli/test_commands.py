"""The commands as a user starts them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.common.config.files import BASE, BLOCKS, with_edits, write

NO_HEAVY_IMPORTS = """
import sys
from trinity.cli.launcher import main
sys.argv = ["trinity", *{arguments!r}]
try:
    main()
except SystemExit as stop:
    code = stop.code
heavy = [name for name in ("torch", "ray", "vllm", "transformers") if name in sys.modules]
sys.stdout.flush()
assert not heavy, heavy
sys.exit(code)
"""


def trinity(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    script = NO_HEAVY_IMPORTS.format(arguments=list(arguments))
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=250)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path, BASE)


def test_help_lists_the_commands_and_is_light():
    result = trinity("--help")
    assert result.returncode == 0
    for name in ("run", "validate", "explain", "schema", "import-verl"):
        assert name in result.stdout


def test_version():
    assert trinity("--version").stdout.startswith("trinity ")


def test_validate_says_yes(file):
    result = trinity("validate", str(file))
    assert result.returncode == 0
    assert "is valid: mode both, grpo" in result.stdout


def test_validate_leaves_nothing_behind(file):
    result = trinity("validate", str(file), cwd=file.parent)
    assert result.returncode == 0
    assert [path.name for path in file.parent.iterdir()] == ["run.yaml"]


def test_validate_counts_the_tasks(tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "1 + 1", "answer": "2"}\n' * 3)
    path = write(tmp_path, with_edits({"buffer.explorer_input.taskset.path": str(tasks)}))
    result = trinity("validate", str(path))
    assert result.returncode == 2
    assert "3 tasks are less than one step of 4 (buffer.batch_size)" in result.stderr
    assert trinity("validate", str(path), "buffer.batch_size=3").returncode == 0


def test_validate_tells_all_problems_with_lines(tmp_path):
    path = write(tmp_path, with_edits({"mode": "boht", "buffer.batch_sise": 3}))
    result = trinity("validate", str(path))
    assert result.returncode == 2
    assert "2 problems in" in result.stderr
    assert "mode = 'boht'" in result.stderr
    assert "Did you mean `batch_size`?" in result.stderr
    assert "Traceback" not in result.stderr


def test_validate_takes_overrides_and_plugins(file, tmp_path):
    taskset = "buffer.explorer_input.taskset.default_workflow_type=mine"
    assert trinity("validate", str(file), taskset).returncode == 2
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    text = '@WORKFLOWS.register_module("mine")\nclass Mine: ...\nraise RuntimeError("not run")\n'
    (plugins / "mine.py").write_text(text)
    result = trinity("validate", str(file), taskset, "--plugin-dir", str(plugins))
    assert result.returncode == 0


@pytest.mark.parametrize("command", ["validate", "explain"])
def test_the_file_is_named_first_or_by_its_option(file, command):
    override = "algorithm.repeat_times=3"
    first = trinity(command, str(file), override)
    for arguments in (("--config", str(file), override), (override, "-c", str(file))):
        by_option = trinity(command, *arguments)
        assert by_option.returncode == 0 and by_option.stdout == first.stdout


@pytest.mark.parametrize("command", ["run", "validate", "explain"])
@pytest.mark.parametrize("arguments", [(), ("a.b=1",)])
def test_a_command_without_a_file_says_how_to_name_one(command, arguments):
    result = trinity(command, *arguments)
    assert result.returncode == 2
    assert result.stderr == "Name the YAML file of the run: my.yaml, or --config my.yaml.\n"


def test_validate_notes_old_spellings(tmp_path):
    path = write(tmp_path, with_edits({"synchronizer.sync_style": "dynamic_by_explorer"}))
    result = trinity("validate", str(path))
    assert result.returncode == 0
    assert "is now called 'explorer_driven'" in result.stderr


def test_run_tells_a_wrong_file_before_it_loads_anything_heavy(tmp_path):
    path = write(tmp_path, with_edits({"buffer.batch_sise": 3, "algorithm.kl_loss_fn": "k9"}))
    result = trinity("run", "--config", str(path), "--cpu")
    assert result.returncode == 2
    assert "2 problems in" in result.stderr
    assert "Did you mean `batch_size`?" in result.stderr


def test_explain_answers_the_question_on_batch_sizes(file):
    result = trinity("explain", str(file))
    assert result.returncode == 0
    for text in ("buffer.batch_size", "buffer.train_batch_size", "ppo_mini_batch_size", "4 x 8"):
        assert text in result.stdout


def test_explain_estimates_memory_and_checkpoints(tmp_path):
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    path = write(tmp_path, with_edits({"model.model_path": str(tmp_path)}))
    result = trinity("explain", str(path), "buffer.total_steps=100", "trainer.save_interval=30")
    assert "actor optimizer" in result.stdout
    assert "KV cache" in result.stdout
    assert "checkpoints" in result.stdout


def test_explain_counts_steps_and_checkpoints_of_a_local_file(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"a": 1}\n' * 40)
    edits = {
        "buffer.explorer_input.taskset.path": str(tmp_path / "tasks.jsonl"),
        "buffer.total_epochs": 3,
        "trainer.save_interval": 7,
        "model.model_path": "org/tiny-1b",
    }
    result = trinity("explain", str(write(tmp_path, with_edits(edits))))
    assert "explorer steps of the run" in result.stdout
    assert any("checkpoints" in line and " 5 " in line for line in result.stdout.splitlines())


def test_explain_estimates_nothing_of_a_model_that_is_at_the_tinker_service(tmp_path):
    edits = {"model.tinker": {"enable": True, "rank": 7}, "model.model_path": "org/tiny-1b"}
    result = trinity("explain", str(write(tmp_path, with_edits(edits))))
    assert result.stdout.count("Tinker service") == 3 and "adapter of rank 7" in result.stdout
    for text in ("micro-batches", "actor optimizer", "KV cache", "a pass"):
        assert text not in result.stdout


def test_explain_shows_every_stage():
    result = trinity("explain", str(BLOCKS / "quickstart_0.yaml"), "stages=[{stage_name: a}]")
    assert "<experiment_name>/a" in result.stdout


def test_schema_is_json_with_sentences():
    schema = json.loads(trinity("schema").stdout)
    assert schema["properties"]["mode"]["description"]
    taskset = schema["$defs"]["TasksetConfig"]["properties"]["path"]
    assert "database" in taskset["description"]


def test_import_verl_writes_a_valid_file(tmp_path):
    out = tmp_path / "out.yaml"
    result = trinity("import-verl", str(BLOCKS / "verl_grpo.sh"), "-o", str(out))
    assert result.returncode == 0
    assert "no counterpart: data.truncation=error" in result.stdout
    assert yaml.safe_load(out.read_text())["algorithm"]["algorithm_type"] == "grpo"
    assert trinity("validate", str(out)).returncode == 0


@pytest.mark.parametrize("command", ["validate", "import-verl"])
def test_a_file_that_is_no_text_is_told_in_one_sentence(tmp_path, command):
    file = tmp_path / "model.bin"
    file.write_bytes(b"\xff\xfe\x00\x80")
    result = trinity(command, str(file))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert str(file) in result.stderr


@pytest.mark.parametrize("command", ["validate", "explain", "import-verl"])
def test_a_missing_file_is_told_in_one_sentence(command):
    result = trinity(command, "/no/such/file")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "/no/such/file" in result.stderr


@pytest.mark.parametrize(
    ("override", "told"),
    [("name=a", "RANK is not set"), ("cluster.ray_address=10.0.0.1:6379", "Leave one out")],
)
def test_dlc_needs_a_job_and_no_other_cluster(file, monkeypatch, override, told):
    monkeypatch.delenv("RANK", raising=False)
    result = trinity("run", "-c", str(file), "--dlc", override)
    assert result.returncode != 0
    assert told in result.stderr
    assert "Traceback" not in result.stderr


def test_explain_breaks_no_key_on_a_narrow_terminal(file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = trinity("explain", str(file)).stdout
    assert max(map(len, shown.splitlines())) <= 80
    for key in ("ppo_micro_batch_size_per_gpu", "trainer.max_token_len_per_gpu"):
        assert f" {key} " in shown
