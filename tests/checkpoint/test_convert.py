import json
import shutil

import pytest
import torch
from torch.distributed import checkpoint as dcp
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.trainer.toy import model_folder, plain_model
from trinity.checkpoint import layout
from trinity.checkpoint.convert import convert, find_step_folders, merge_lora
from trinity.checkpoint.megatron import random_state_grid
from trinity.cli.launcher import app

TOKENS = torch.arange(3, 30)[None]


def checkpoint(job, step: int, base: str, tied: bool = True):
    """A checkpoint of one rank without Hugging Face weights; the model that it holds."""
    actor = layout.step_folder(job, step) / "actor"
    (actor / "huggingface").mkdir(parents=True)
    shutil.copy(f"{base}/config.json", actor / "huggingface")
    model = plain_model(base, seed=step)
    torch.save(model.state_dict(), actor / layout.shard_name("model", 1, 0))
    return model


def logits(folder) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits


@pytest.mark.parametrize("tied", [True, False])
def test_all_checkpoints_of_a_job_are_converted_once(tmp_path, tied):
    base = model_folder(tmp_path / "base", tie_word_embeddings=tied, dtype="float32")
    models = {step: checkpoint(tmp_path / "job", step, base) for step in (3, 20)}
    critic = tmp_path / "job/global_step_3/critic"
    critic.mkdir()
    torch.save({"score.weight": torch.ones(1)}, critic / layout.shard_name("model", 1, 0))
    result = CliRunner().invoke(app, ["convert", "-c", str(tmp_path / "job")])
    assert result.exit_code == 0, result.output
    assert [path.name for path in critic.iterdir()] == [layout.shard_name("model", 1, 0)]
    for step, model in models.items():
        folder = tmp_path / f"job/global_step_{step}/actor/huggingface"
        torch.testing.assert_close(logits(folder), model(TOKENS).logits, atol=1e-5, rtol=1e-5)
    for inner in ("", "actor", "actor/huggingface", "actor/model_world_size_1_rank_0.pt"):
        path = tmp_path / "job/global_step_3" / inner
        again = CliRunner().invoke(app, ["convert", "-c", str(path)])
        assert again.exit_code == 0
        assert "skipped" in again.output
        assert "global_step_20" not in again.output


def test_jobs_are_found_however_deep_they_lie(tmp_path):
    base = model_folder(tmp_path / "base")
    jobs = [tmp_path / "root/project/a", tmp_path / "root/project/b/rft", tmp_path / "root/other"]
    for job in jobs:
        checkpoint(job, 1, base)
    (jobs[0] / "global_step_x").mkdir()
    result = CliRunner().invoke(app, ["convert", "-c", str(tmp_path / "root")])
    assert result.exit_code == 0, result.output
    assert "[3/3]" in result.output
    for name in ("project/a/global_step_1", "project/b/rft/global_step_1", "other/global_step_1"):
        assert f"│ {name} " in result.output
    for job in jobs:
        assert (job / "global_step_1/actor/huggingface/model.safetensors").is_file()


def test_a_missing_config_needs_the_base_model(tmp_path):
    base = model_folder(tmp_path / "base")
    checkpoint(tmp_path, 1, base)
    (tmp_path / "global_step_1/actor/huggingface/config.json").unlink()
    result = CliRunner().invoke(app, ["convert", "-c", str(tmp_path)])
    assert result.exit_code == 1
    assert "--base-model-dir" in result.output
    result = CliRunner().invoke(app, ["convert", "-c", str(tmp_path), "-b", base])
    assert result.exit_code == 0, result.output


def test_one_failure_is_told_and_the_others_go_on(tmp_path):
    base = model_folder(tmp_path / "base")
    checkpoint(tmp_path, 1, base)
    checkpoint(tmp_path, 2, base)
    (tmp_path / "global_step_1/actor/model_world_size_1_rank_0.pt").unlink()
    result = CliRunner().invoke(app, ["convert", "-c", str(tmp_path)])
    assert result.exit_code == 1
    assert "neither FSDP shards" in result.output
    assert (tmp_path / "global_step_2/actor/huggingface/model.safetensors").is_file()
    only = CliRunner().invoke(app, ["convert", "-c", str(tmp_path), "--step", "2,5"])
    assert only.exit_code == 1
    assert "No global_step_5" in only.output
    words = CliRunner().invoke(app, ["convert", "-c", str(tmp_path), "--step", "last"])
    assert words.exit_code == 1
    assert "--step is 'last'" in words.output


def test_no_checkpoint_at_all(tmp_path):
    assert find_step_folders(tmp_path) == []
    assert CliRunner().invoke(app, ["convert", "-c", str(tmp_path)]).exit_code == 1


@pytest.mark.parametrize("tied", [True, False])
def test_megatron_layers_are_unstacked_and_padding_of_the_vocabulary_is_cut(tmp_path, tied):
    shape = {"tie_word_embeddings": tied, "attention_bias": tied}
    base = model_folder(tmp_path / "base", dtype="float32", **shape)
    model = checkpoint(tmp_path, 1, base)
    actor = tmp_path / "global_step_1" / "actor"
    (actor / layout.shard_name("model", 1, 0)).unlink()
    weights = as_megatron(model)
    weights["embedding.word_embeddings.weight"] = torch.nn.functional.pad(
        weights["embedding.word_embeddings.weight"], (0, 0, 0, 31), value=7.0
    )
    place = actor / ("dist_ckpt" if tied else "model/dist_ckpt")
    dcp.save(weights, checkpoint_id=str(place), no_dist=True)
    outcome = convert(tmp_path / "global_step_1")
    assert (outcome.status, outcome.message) == ("converted", "from Megatron")
    torch.testing.assert_close(logits(actor / "huggingface"), model(TOKENS).logits)


def test_random_state_tells_for_how_many_ranks_it_is(tmp_path):
    for name, wanted in {"rng_state/shard_0.1_4.2": (4, 2), "other": None}.items():
        folder = tmp_path / str(wanted)
        dcp.save({name: b"state"}, checkpoint_id=str(folder), no_dist=True)
        assert random_state_grid(folder) == wanted


def as_megatron(model) -> dict[str, torch.Tensor]:
    """The model's weights as Megatron lays them out."""
    layers = model.model.layers
    config = model.config
    groups, size = config.num_key_value_heads, config.head_dim

    def qkv(attention, kind: str = "weight") -> torch.Tensor:
        parts = [getattr(attention, f"{name}_proj") for name in "qkv"]
        tensors = [getattr(part, kind) for part in parts]
        blocks = [t.view(groups, -1, size, *t.shape[1:]) for t in tensors]
        return torch.cat(blocks, dim=1).flatten(0, 2)

    def stack(pick) -> torch.Tensor:
        return torch.stack([pick(layer) for layer in layers]).detach()

    rest = {} if config.tie_word_embeddings else {"output_layer.weight": model.lm_head.weight}
    if config.attention_bias:
        rest |= {
            "decoder.layers.self_attention.linear_qkv.bias": stack(
                lambda x: qkv(x.self_attn, "bias")
            ),
            "decoder.layers.self_attention.linear_proj.bias": stack(
                lambda x: x.self_attn.o_proj.bias
            ),
        }
    return {
        **{name: weight.detach() for name, weight in rest.items()},
        "embedding.word_embeddings.weight": model.model.embed_tokens.weight.detach(),
        "decoder.final_layernorm.weight": model.model.norm.weight.detach(),
        "decoder.layers.self_attention.linear_qkv.weight": stack(lambda x: qkv(x.self_attn)),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": stack(
            lambda x: x.input_layernorm.weight
        ),
        "decoder.layers.self_attention.linear_proj.weight": stack(
            lambda x: x.self_attn.o_proj.weight
        ),
        "decoder.layers.mlp.linear_fc1.weight": stack(
            lambda x: torch.cat([x.mlp.gate_proj.weight, x.mlp.up_proj.weight])
        ),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": stack(
            lambda x: x.post_attention_layernorm.weight
        ),
        "decoder.layers.mlp.linear_fc2.weight": stack(lambda x: x.mlp.down_proj.weight),
    }


def test_an_adapter_is_merged_as_peft_does():
    base = {"model.layers.0.q_proj.weight": torch.randn(6, 4)}
    down, up = torch.randn(2, 4), torch.randn(6, 2)
    prefix = "base_model.model.model.layers.0.q_proj"
    adapter = {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
    merged = merge_lora(base, adapter, json.loads('{"r": 2, "lora_alpha": 8}'))
    wanted = base["model.layers.0.q_proj.weight"] + 4 * up @ down
    torch.testing.assert_close(merged["model.layers.0.q_proj.weight"], wanted)


def test_a_checkpoint_whose_weights_are_at_a_service_is_left_alone(tmp_path):
    """Of a run at Tinker only the last checkpoint has its adapter here, and that if asked for."""
    actor = layout.step_folder(tmp_path / "job", 2) / "actor"
    actor.mkdir(parents=True)
    (actor / layout.TINKER).write_text("{}")
    base = model_folder(tmp_path / "base")
    arguments = ["convert", "-c", str(tmp_path / "job"), "-b", base, "--merge"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Tinker service" in result.output
    assert [path.name for path in actor.iterdir()] == [layout.TINKER]
