"""A whole run whose engine is vLLM on a CPU, with an adapter, killed inside (`make test-vllm`)."""

import contextlib
import importlib.util
import json
import shutil
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Start
from tests.e2e.test_grpo_run import scalars
from tests.e2e.test_killed_parts import finishes_without_engine, held
from tests.e2e.toy import Toy

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def wide_model(toy: Toy, folder: Path) -> str:
    """The toy model with heads as wide as vLLM wants them on a CPU."""
    shutil.copytree(toy.model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 32}))
    return str(folder)


def command_of(process: psutil.Process) -> str:
    """Its command line; empty if it has just ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def test_vllm_killed_inside_a_run_of_an_adapter_comes_back_and_nothing_counts_twice(
    toy: Toy, start: Start, tmp_path: Path
) -> None:
    go, tasks = held(tmp_path, task=17)  # of step 5
    config = toy.config(
        tmp_path,
        model__model_path=wide_model(toy, tmp_path / "model"),
        model__lora_configs=[{"lora_rank": 4, "lora_alpha": 8}],
        buffer__total_steps=5,
        buffer__explorer_input__taskset=tasks,
        explorer__rollout_model={
            "engine_type": "vllm",
            "enforce_eager": True,
            "extra_engine_args": {"kv_cache_memory_bytes": 2**28},
        },
    )
    run = start(config)
    run.wait_for(lambda: "Step 3:" in run.log("explorer"), "step 3")
    started = psutil.Process(run.process.pid).children(recursive=True)
    [inner] = [process for process in started if "EngineCore" in command_of(process)]
    finishes_without_engine(run, inner.pid, 5, go)
    assert max(scalars(run.job, "trainer")["actor/ratio_max_deviation"]) < 1e-2
    assert run.remaining() == []
