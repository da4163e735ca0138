"""`trinity debug` as a person calls it: light without a model, and over two terminals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.common.models.toy import model_folder

HEAVY = ("ray", "transformers", "datasets", "openai", "fastapi", "pandas")
SCRIPT = f"""
import sys
from trinity.cli.launcher import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("heavy:", [name for name in {HEAVY} if name in sys.modules])
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = model_folder(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "1+1", "a": "2"}))
    file = tmp_path / "c.yaml"
    file.write_text(
        f"""
project: p
name: n
mode: explore
checkpoint_root_dir: {tmp_path}
algorithm: {{algorithm_type: grpo, repeat_times: 4}}
model: {{model_path: {model}, max_model_len: 128, max_response_tokens: 8}}
cluster: {{node_num: 1, gpu_per_node: 0}}
explorer: {{rollout_model: {{engine_type: torch, dtype: float32}}}}
buffer:
  explorer_input:
    taskset:
      path: {tmp_path}/rows.jsonl
      default_workflow_type: simple_workflow
      default_reward_fn_type: exact_match_reward
      format: {{prompt_key: q, response_key: a}}
"""
    )
    return file


def arguments(config: Path, *more: str) -> list[str]:
    return ["debug", "--config", str(config), "-o", str(config.parent / "out"), *more]


def test_scripted_replies_load_nothing_heavy(config: Path):
    """The whole takes 1.7 to 2.3 s; `import torch` is 1.0 to 1.5 of them."""
    shown = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments(config, "--fake", "2")],
        capture_output=True, text=True, timeout=400, cwd=config.parent,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "accuracy 1" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "heavy: []"


@pytest.mark.slow
def test_a_model_in_one_terminal_serves_the_workflow_in_another(config: Path):
    command = [sys.executable, "-m", "trinity.cli.launcher"]
    env = {**os.environ, "TMPDIR": str(config.parent), "OMP_NUM_THREADS": "1"}
    log = config.parent / "screen.txt"
    with log.open("w") as screen:
        server = subprocess.Popen(
            [*command, *arguments(config, "--module", "inference_model")],
            stdout=screen, stderr=screen, env=env,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 400
        while "In another terminal" not in log.read_text():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        shown = subprocess.run(
            [*command, *arguments(config, "--module", "workflow", "--repeat", "2")],
            capture_output=True, text=True, timeout=400, env=env,
        )  # fmt: skip
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert "the one of the other terminal" in shown.stdout and "run 1, step 0" in shown.stdout
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(250)
        finally:
            server.kill()
    assert not list(config.parent.glob("trinity_debug_*/*.sock"))


@pytest.mark.slow
def test_a_file_for_gpus_is_tried_on_the_cpu(config: Path):
    text = config.read_text().replace("gpu_per_node: 0", "gpu_per_node: 2")
    config.write_text(text.replace("engine_type: torch", "engine_type: vllm"))
    shown = subprocess.run(
        [sys.executable, "-m", "trinity.cli.launcher", *arguments(config, "--cpu")],
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "Written:" in shown.stdout
