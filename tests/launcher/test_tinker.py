"""What is refused before a run at the Tinker service starts, and what its checkpoints give."""

import sys
from pathlib import Path

import pytest

from tests.trainer.toy import tiny_config
from trinity.checkpoint import atomic
from trinity.common.config import Config, InferenceModelConfig
from trinity.common.constants import Mode
from trinity.engine.tinker.engine import TinkerEngine
from trinity.engine.tinker.saved import SavedModel
from trinity.launcher.build_engine import tinker_settings
from trinity.launcher.check_trainer import trainer_problems
from trinity.launcher.checks import find_start_problems
from trinity.launcher.debug import local_engine
from trinity.launcher.plan import RunPlan, make_plan
from trinity.launcher.tinker import checkpoint_ticket, tinker_service

SAVED = SavedModel("toy/model", 8, "tinker://a/weights/b", "tinker://a/sampler_weights/b", 4)


def plan_of(root: Path, tinker: dict[str, object] | None = None, **algorithm: object) -> RunPlan:
    tiny_config().save_pretrained(root / "model")
    config = {
        "checkpoint_root_dir": str(root / "jobs"),
        "model": {
            "model_path": str(root / "model"),
            "max_model_len": 64,
            "tinker": {"enable": True, "base_model": "toy/model", "rank": 8, **(tinker or {})},
        },
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2, **algorithm},
        "buffer": {"batch_size": 2, "total_steps": 1},
    }
    return make_plan(Config.model_validate(config), found_gpus=4)


def told(plan: RunPlan) -> list[str]:
    return [f"{p.key}: {p.message} {p.fix}" for p in trainer_problems(plan)]


def save(plan: RunPlan, saved: SavedModel | None) -> Path:
    path = plan.job.path / "global_step_4"
    with atomic.writing_folder(path) as aside:
        if saved is not None:
            saved.write(aside / "actor")
    return path


def test_it_needs_no_gpu(tmp_path):
    plan = plan_of(tmp_path)
    assert (plan.gpus.trainer, plan.gpus.explorer, told(plan)) == (0, 0, [])


def test_a_loss_that_reads_entropies_is_refused(tmp_path):
    [found] = told(plan_of(tmp_path, advantage_fn="clipv"))
    assert found.startswith("algorithm.advantage_fn: It reads entropies")


def test_checkpoints_that_it_can_not_go_on_from_are_refused(tmp_path):
    plan = plan_of(tmp_path)
    folder = save(plan, SAVED)
    assert told(plan) == []
    ticket = checkpoint_ticket(folder)
    assert (ticket.version, ticket.method, ticket.payload) == (4, "tinker", SAVED.sampler)
    [found] = told(plan_of(tmp_path, {"rank": 16}))
    assert "global_step_4 is an adapter of rank 8 on toy/model" in found and "rank 16" in found
    save(plan, None)
    [found] = told(plan)
    assert "not made by `trainer_type: tinker`" in found and "another name" in found


def test_the_address_and_the_name_are_those_of_the_file(tmp_path):
    config = plan_of(tmp_path, {"base_url": "http://here", "timeout": 7}).config
    service = tinker_service(config)
    assert (service.base_model, service.base_url, service.timeout_s) == (
        "toy/model",
        "http://here",
        7,
    )
    teacher = InferenceModelConfig(engine_type="tinker", model_path="teacher/model")
    for model, name in ((config.explorer.rollout_model, "toy/model"), (teacher, "teacher/model")):
        settings = tinker_settings(config, model)
        assert (settings.service.base_model, settings.tokenizer_path) == (name, model.model_path)
        assert not settings.keeps_temperature
    serving = config.model_copy(update={"mode": Mode.SERVE})
    assert tinker_settings(serving, serving.explorer.rollout_model).keeps_temperature


def problems(plan: RunPlan) -> list[str]:
    found = find_start_problems(plan.config)
    return [f"{p.key}: {p.message} {p.fix}" for p in found if "inker" in f"{p.key} {p.message}"]


def test_a_key_is_needed_and_looked_for_in_both_variables(tmp_path, monkeypatch):
    pytest.importorskip("tinker")
    for name in ("TINKER_API_KEY", "TRINITY_API_KEY", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    [found] = problems(plan_of(tmp_path))
    assert "neither TINKER_API_KEY nor TRINITY_API_KEY is set" in found
    monkeypatch.setenv("TRINITY_API_KEY", "tml-1")
    assert problems(plan_of(tmp_path)) == []
    [found] = problems(plan_of(tmp_path, {"base_model": None}))
    assert found.startswith("model.tinker.base_model") and "owner/name" in found


def test_a_missing_library_is_told_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-1")
    monkeypatch.setitem(sys.modules, "tinker", None)
    for found in problems(plan_of(tmp_path)):
        assert "pip install 'trinity-rft[tinker]'" in found and "--cpu" not in found
    assert len(problems(plan_of(tmp_path))) == 2


def test_a_workflow_is_debugged_on_the_service(tmp_path):
    config = plan_of(tmp_path).config
    assert isinstance(local_engine(config, config.explorer.rollout_model), TinkerEngine)
