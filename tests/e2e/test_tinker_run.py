"""Runs whose model is at the Tinker service, from their command line to their files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("tinker")

from transformers import AutoTokenizer

from tests.e2e.command import Command
from tests.e2e.conftest import Start
from tests.e2e.test_grpo_run import scalars
from tests.e2e.toy import Toy, eval_set
from tests.tinker_service import KEY, TinkerTestService
from trinity.common.models.loading import end_of_sequence_ids, load_causal_lm
from trinity.engine.tinker.saved import SavedModel

NAME = "toy/model"
ENV = {"TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
STEPS = 12


@pytest.fixture
def service(toy: Toy) -> Iterator[TinkerTestService]:
    folder = str(toy.model)
    decode = AutoTokenizer.from_pretrained(folder).decode
    models = {NAME: lambda: load_causal_lm(folder, "float32", 0)[0]}
    made = TinkerTestService(models, end_of_sequence_ids(folder), decode, max_context_length=64)
    with made.serving():
        yield made


def config_of(toy: Toy, folder: Path, service: TinkerTestService, **changes: object) -> Path:
    """The toy's run, with the model at the service."""
    tinker = {"enable": True, "base_model": NAME, "base_url": service.address, "rank": 8, "seed": 1}
    path = toy.config(folder, model__tinker=tinker, trainer__save_interval=STEPS // 2, **changes)
    given = yaml.safe_load(path.read_text())
    del given["explorer"]["rollout_model"], given["trainer"]["dtype"]
    given["algorithm"]["optimizer"]["lr"] = 2e-2
    path.write_text(yaml.safe_dump(given))
    return path


def weights_of(job: Path, service: TinkerTestService) -> dict[str, torch.Tensor]:
    saved = SavedModel.read(job / f"global_step_{STEPS}" / "actor")
    assert (saved.base_model, saved.rank, saved.num_steps) == (NAME, 8, STEPS)
    return service.saved[saved.sampler].weights


def test_a_run_learns(toy: Toy, start: Start, service: TinkerTestService, tmp_path: Path) -> None:
    config = config_of(toy, tmp_path, service, buffer__total_steps=STEPS)
    _assert_learned(start(config, env=ENV).succeed())


@pytest.mark.long
def test_a_run_that_is_stopped_and_resumed_learns_the_same(
    toy: Toy, start: Start, service: TinkerTestService, tmp_path: Path
) -> None:
    run = start(config_of(toy, tmp_path / "a", service, buffer__total_steps=STEPS), env=ENV)
    run.succeed()
    half = config_of(toy, tmp_path / "b", service, buffer__total_steps=STEPS // 2)
    start(half, env=ENV).succeed()
    rest = start(half, f"buffer.total_steps={STEPS}", env=ENV).succeed()
    assert f"resumed at step {STEPS // 2}" in rest.screen
    wanted = weights_of(run.job, service)
    for name, value in weights_of(rest.job, service).items():
        torch.testing.assert_close(value, wanted[name], atol=1e-6, rtol=1e-5)


def _assert_learned(run: Command) -> None:
    [stage] = run.summary["stages"]
    assert (stage["steps"], stage["failed_tasks"]) == (STEPS, 0)
    assert sum(stage["rewards"][-4:]) > 1.5 * sum(stage["rewards"][:4])
    assert stage["max_ratio_deviation"] <= 1e-5
    found = scalars(run.job, "trainer")
    assert {"actor/grad_norm", "actor/lr", "time/sync_weight"} <= set(found)
    names = {path.name for path in (run.job / f"global_step_{STEPS}" / "actor").iterdir()}
    assert names == {"tinker.json"}
    assert "Tinker service" in run.screen and "Traceback" not in run.screen
    assert run.remaining() == []


@pytest.mark.long
def test_a_benchmark_scores_what_the_checkpoints_name(
    toy: Toy, start: Start, service: TinkerTestService, tmp_path: Path
) -> None:
    evals = eval_set(toy)
    config = config_of(
        toy, tmp_path, service,
        buffer__total_steps=STEPS, buffer__explorer_input__eval_tasksets=evals,
    )  # fmt: skip
    trained = start(config, env=ENV).succeed().summary["stages"][0]
    found = start(config, "mode=bench", env=ENV).succeed().summary["stages"][0]["evals"]
    assert list(found) == ["0", str(STEPS // 2), str(STEPS)]
    score = "unseen/accuracy/mean@1"
    assert found["0"][f"bench/{score}"] == trained["eval_before"][f"eval/{score}"]
    assert found[str(STEPS)][f"bench/{score}"] == trained["eval_after"][f"eval/{score}"]
    assert found["0"][f"bench/{score}"] < found[str(STEPS)][f"bench/{score}"]


@pytest.mark.long
def test_explorer_and_trainer_may_be_two_commands(
    toy: Toy, start: Start, service: TinkerTestService, tmp_path: Path
) -> None:
    shared = {"name": "shared", "max_read_timeout": 400, "storage_type": "sql"}
    shared["path"] = f"sqlite:///{tmp_path}/shared.db"
    settings = {
        "checkpoint_root_dir": str(tmp_path / "jobs"),
        "buffer__total_steps": 3,
        "buffer__trainer_input": {"experience_buffer": shared},
    }
    exploring = start(config_of(toy, tmp_path / "e", service, mode="explore", **settings), env=ENV)
    training = start(config_of(toy, tmp_path / "t", service, mode="train", **settings), env=ENV)
    training.succeed()
    exploring.succeed()
    assert scalars(exploring.job, "explorer")["rollout/model_version"] == [0, 1, 2]


@pytest.mark.long
def test_a_service_that_dies_ends_the_run_and_is_named(
    toy: Toy, start: Start, service: TinkerTestService, tmp_path: Path
) -> None:
    config = config_of(toy, tmp_path, service, buffer__total_steps=1000)
    run = start(config, "model.tinker.timeout=30", env=ENV)
    run.wait_for_step(1)
    service.status = 500
    assert run.wait() != 0
    assert f"The Tinker service at {service.address}" in run.last_lines
    assert "answers with status 500" in run.last_lines
    assert run.remaining() == []


def test_a_missing_key_and_name_are_told_at_the_start(
    toy: Toy, start: Start, service: TinkerTestService, tmp_path: Path
) -> None:
    env = {"TINKER_API_KEY": "", "TRINITY_API_KEY": "", "HOME": str(tmp_path)}
    config = config_of(toy, tmp_path, service)
    run = start(config, "model.tinker.base_model=null", env=env)
    assert run.wait() == 2
    assert "neither TINKER_API_KEY nor TRINITY_API_KEY is set" in run.screen
    assert "model.tinker.base_model" in run.screen
    assert not run.job.exists() and service.requests == []
