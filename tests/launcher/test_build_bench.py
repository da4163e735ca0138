"""Which weights a benchmark reads from checkpoints, and what it refuses before it starts."""

import json

import pytest
import torch
from torch.distributed import checkpoint as dcp

from tests.checkpoint.test_convert import as_megatron, checkpoint
from tests.launcher.test_check_trainer import plan_of
from tests.trainer.toy import model_folder, tiny_config
from trinity.checkpoint import layout
from trinity.launcher.build_bench import build, engine_dtype, weights_of
from trinity.launcher.check_bench import bench_problems
from trinity.utils.log import get_logger


@pytest.mark.parametrize("tied", [True, False])
def test_megatrons_own_files_give_what_hugging_face_would(tmp_path, tied):
    base = model_folder(tmp_path / "base", tie_word_embeddings=tied)
    model = checkpoint(tmp_path, 1, base)
    actor = tmp_path / "global_step_1" / "actor"
    (actor / layout.shard_name("model", 1, 0)).unlink()
    place = actor / "model" / layout.DIST_CHECKPOINT
    dcp.save(as_megatron(model), checkpoint_id=str(place), no_dist=True)
    found, wanted = dict(weights_of(actor)), dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


def test_megatrons_files_of_other_models_are_refused_at_start(tmp_path):
    plan = plan_of(tmp_path, mode="bench")
    folders = [layout.step_folder(plan.job.path, step) / "actor" for step in (1, 2, 3)]
    kinds = ["qwen3", "qwen3_moe", "qwen3_moe"]
    for folder, kind in zip(folders, kinds, strict=True):
        (folder / "model" / layout.DIST_CHECKPOINT).mkdir(parents=True)
        (folder / "huggingface").mkdir()
        (folder / "huggingface" / "config.json").write_text(json.dumps({"model_type": kind}))
    (folders[2] / "huggingface" / "model.safetensors").touch()
    [found] = bench_problems(plan)
    assert "global_step_2 holds Megatron's files alone" in found.message
    assert "this is qwen3_moe" in found.message and "save_hf_checkpoint: always" in found.fix
    assert list(bench_problems(plan_of(tmp_path, mode="train"))) == []


def test_broken_checkpoints_are_told_and_refused_if_there_are_no_others(tmp_path, caplog):
    plan = plan_of(tmp_path, mode="bench")
    for step in (1, 2):
        (layout.step_folder(plan.job.path, step) / "actor").mkdir(parents=True)
    [found] = bench_problems(plan)
    assert "is whole (global_step_2: " in found.message and "holds no model_world" in found.message
    (layout.step_folder(plan.job.path, 1) / "actor" / layout.shard_name("model", 1, 0)).touch()
    assert list(bench_problems(plan)) == []
    tiny_config().save_pretrained(tmp_path / "model")
    get_logger("benchmark").addHandler(caplog.handler)
    assert [candidate.step for candidate in build(plan, None).candidates] == [1]
    assert "global_step_2 is not whole and is left out: " in caplog.text


@pytest.mark.parametrize(
    ("own", "wanted"),
    [("bfloat16", torch.bfloat16), ("float16", torch.float16), (None, torch.float32)],
)
def test_the_models_own_number_format_is_that_of_the_weights_sent(tmp_path, own, wanted):
    rollout = {"engine_type": "torch", "dtype": "auto"}
    plan = plan_of(tmp_path, mode="bench", explorer={"rollout_model": rollout})
    tiny_config(dtype=own).save_pretrained(tmp_path / "model")
    assert engine_dtype(plan.config.explorer.rollout_model) is wanted
    assert list(build(plan, None).candidates) == []
