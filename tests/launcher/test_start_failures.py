"""What keeps engines from starting is told before anything starts, by its key."""

import socket
from pathlib import Path

import pytest

from tests.common.models.toy import model_folder
from trinity.common.config import Config, derive
from trinity.launcher.checks import find_start_problems
from trinity.launcher.gpu_needs import gpu_needs, joined_gpus
from trinity.launcher.plan import make_plan


def problems(root: Path, model: str, **rollout: object) -> dict[str, str]:
    return problems_of(root, model, {"rollout_model": {"engine_type": "torch", **rollout}})


def problems_of(
    root: Path, model: str, explorer: dict[str, object], ray_address: str = "local"
) -> dict[str, str]:
    config = {
        "cluster": {"ray_address": ray_address},
        "checkpoint_root_dir": str(root / "jobs"),
        "mode": "explore",
        "model": {"model_path": model, "max_model_len": 64},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
        "buffer": {"batch_size": 2, "total_steps": 1},
        "explorer": explorer,
    }
    plan = make_plan(Config.model_validate(config), found_gpus=0)
    return {p.key: f"{p.message} {p.fix}" for p in find_start_problems(plan.config)}


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = problems(tmp_path, model, enable_openai_api=True, base_port=port)
        key = "explorer.rollout_model.base_port"
        assert f"Port {port} is in use" in found[key] and "Name a free port" in found[key]
        assert key not in problems(tmp_path, model, base_port=port)  # no API: nobody listens


def test_a_root_that_is_a_file_is_told_with_the_variable(tmp_path: Path) -> None:
    (tmp_path / "jobs").touch()
    found = problems(tmp_path, model_folder(tmp_path / "model"))["checkpoint_root_dir"]
    assert "is a file. Name a folder" in found
    (tmp_path / "jobs").unlink()
    assert "checkpoint_root_dir" not in problems(tmp_path, str(tmp_path / "model"))


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="Linux")
def test_a_root_that_cannot_be_written_to_is_told_with_the_variable(tmp_path: Path) -> None:
    found = problems(Path("/proc"), model_folder(tmp_path / "model"))["checkpoint_root_dir"]
    assert "or set TRINITY_CHECKPOINT_ROOT_DIR" in found


def test_the_folder_of_a_model_at_a_service_is_not_looked_for(tmp_path: Path) -> None:
    here = {"rollout_model": {"engine_type": "torch"}}
    outside = {"rollout_model": {"engine_type": "openai"}}
    gone = str(tmp_path / "gone")
    assert "no such folder" in problems_of(tmp_path, gone, here)["model.model_path"]
    assert "model.model_path" not in problems_of(tmp_path, gone, outside)


def test_a_service_without_its_variables_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_folder(tmp_path / "model")
    service = {"base_url_env": "A_JUDGE_URL", "api_key_env": "A_JUDGE_KEY", "model_name": "judge"}
    judge = {"engine_type": "openai", "external_model_config": service}
    explorer = {"rollout_model": {"engine_type": "torch"}, "auxiliary_models": [judge]}
    key = "explorer.auxiliary_models.0.external_model_config"
    monkeypatch.delenv("A_JUDGE_URL", raising=False)
    monkeypatch.delenv("A_JUDGE_KEY", raising=False)
    found = problems_of(tmp_path, model, explorer)
    assert "A_JUDGE_URL is not set" in found[f"{key}.base_url_env"]
    assert "A_JUDGE_KEY is not set" in found[f"{key}.api_key_env"]
    elsewhere = problems_of(tmp_path, model, explorer, "10.0.0.1:6379")
    assert f"{key}.base_url_env" not in elsewhere  # that cluster may have them
    monkeypatch.setenv("A_JUDGE_URL", "http://127.0.0.1:1/v1")
    found = problems_of(tmp_path, model, explorer)
    assert f"{key}.base_url_env" not in found and f"{key}.api_key_env" in found


def test_a_cluster_of_the_runs_own_has_no_more_gpus_than_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def joined(ray_address: str, variable: str = "") -> int | None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
        cluster = {"ray_address": ray_address, "node_num": 2, "gpu_per_node": 4}
        return joined_gpus(Config.model_validate({"cluster": cluster}))

    assert joined("auto") is joined("local") is joined("auto", "local") is None
    assert joined("10.0.0.1:6379") == joined("auto", "10.0.0.1:6379") == 8
    assert joined("local", "10.0.0.1:6379") is None


def test_gpus_of_auxiliary_models_are_asked_for_too() -> None:
    judge = {"model_path": "/judge", "engine_type": "vllm", "engine_num": 2}
    outside = {"model_path": "gpt", "engine_type": "openai"}
    config = {
        "model": {"model_path": "/model", "max_model_len": 64},
        "explorer": {
            "rollout_model": {"engine_type": "vllm", "tensor_parallel_size": 2},
            "auxiliary_models": [{**judge, "tensor_parallel_size": 2}, outside],
        },
    }
    needs = gpu_needs(derive(Config.model_validate(config)).config, found=7)
    assert (needs.explorer, needs.auxiliary, needs.trainer, needs.total) == (2, 4, 1, 7)
    assert gpu_needs(derive(Config.model_validate(config)).config, found=6).total == 7


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "model.model_path" in problems(tmp_path, str(tmp_path / "empty"))
    assert "model.model_path" in problems(tmp_path, str(tmp_path / "nowhere"))
    assert "model.model_path" not in problems(tmp_path, model_folder(tmp_path / "model"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b'{"a": ', b"\xff\xfe\xfa"])
def test_a_file_of_the_model_that_was_cut_is_named(
    name: str, content: bytes, tmp_path: Path
) -> None:
    folder = Path(model_folder(tmp_path / "model"))
    (folder / name).write_bytes(content)
    told = problems(tmp_path, str(folder))["model.model_path"]
    assert told.startswith(f"Its {name} can't be read: ")
