import json
import pickle
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.trainer.toy import model_folder, plain_model
from trinity.checkpoint import layout
from trinity.checkpoint.convert import convert, find_step_folders, load_folder, merge_lora
from trinity.checkpoint.megatron import load_dist_checkpoint, random_state_grid
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


def test_checkpoints_are_found_in_the_order_of_their_steps(tmp_path, monkeypatch):
    for step in (20, 3, 100):
        layout.step_folder(tmp_path, step).mkdir()
    (tmp_path / "global_step_4").touch()
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, Path(".")):
        assert find_step_folders(path) == [layout.step_folder(tmp_path, n) for n in (3, 20, 100)]


def test_what_a_checkpoint_lacks_is_named(tmp_path):
    folder = layout.step_folder(tmp_path, 1)
    folder.mkdir()
    assert convert(folder).message == "global_step_1 has no folder actor."
    (folder / "actor").mkdir()
    outcome = convert(folder, tmp_path / "nowhere")
    assert outcome.status == "failed" and "nowhere, which has no config.json" in outcome.message


def test_a_config_that_is_there_is_not_that_of_the_base(tmp_path):
    """Nor its tokenizer: training may have changed both."""
    actor, base, _ = of_adapter(tmp_path, "whole")
    (base / "tokenizer.json").write_text("of the base")
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "config.json").write_text(json.dumps({"dtype": "float32"}))
    assert convert(actor.parent, base, merges=True).status == "converted"
    found = load_file(actor / "huggingface" / "model.safetensors")
    assert {weight.dtype for weight in found.values()} == {torch.float32}
    assert (actor / "huggingface" / "tokenizer.json").read_text() == "of the base"


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


TARGET = "model.layers.0.q_proj"
WRAPPED = f"base_model.model.{TARGET}"


def small_adapter(rank: int = 2) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """An adapter by PEFT's names, and ``B @ A``."""
    down, up = torch.randn(rank, 4), torch.randn(6, rank)
    return {f"{WRAPPED}.lora_A.weight": down, f"{WRAPPED}.lora_B.weight": up}, up @ down


@pytest.mark.parametrize(("is_stabilised", "scale"), [(False, 2.0), (True, 4.0)])
def test_an_adapter_is_merged_as_peft_does(is_stabilised, scale):
    """With the rank that a layer has, which ``rank_pattern`` makes another one."""
    base = {f"{TARGET}.weight": torch.randn(6, 4), "norm.weight": torch.ones(4)}
    adapter, product = small_adapter(rank=4)
    settings = {"r": 2, "lora_alpha": 8, "use_rslora": is_stabilised}
    merged = merge_lora(base, adapter, settings)
    assert merged.keys() == base.keys() and torch.equal(merged["norm.weight"], torch.ones(4))
    wanted = base[f"{TARGET}.weight"] + scale * product
    torch.testing.assert_close(merged[f"{TARGET}.weight"], wanted)


@pytest.mark.parametrize(
    ("more", "settings", "word"),
    [
        ({"base_model.model.lm_head.weight": torch.ones(1)}, {}, "lm_head"),  # `modules_to_save`
        ({f"{WRAPPED}.lora_magnitude_vector": torch.ones(6)}, {}, "magnitude"),
        ({}, {"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({}, {"fan_in_fan_out": True}, "fan_in_fan_out"),
    ],
)
def test_no_part_of_an_adapter_is_left_out_of_a_merge(more, settings, word):
    adapter, _ = small_adapter()
    base = {f"{TARGET}.weight": torch.zeros(6, 4)}
    with pytest.raises(ValueError, match=f"adapter has .*{word}.*merge_and_unload"):
        merge_lora(base, adapter | more, {"lora_alpha": 8, **settings})
    with pytest.raises(
        ValueError, match=r"changes model\.layers\.0\.q_proj\.weight, which the base"
    ):
        merge_lora({}, adapter, {"lora_alpha": 8})


def of_adapter(job: Path, kind: str) -> tuple[Path, Path, torch.Tensor]:
    """A checkpoint with an adapter, its base model, and the weight that they make."""
    actor, base = layout.step_folder(job, 1) / "actor", job / "base"
    (actor / layout.LORA_ADAPTER).mkdir(parents=True)
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"dtype": "float16"}))
    settings = json.dumps({"r": 2, "lora_alpha": 8})
    (actor / layout.LORA_ADAPTER / "adapter_config.json").write_text(settings)
    adapter, product = small_adapter()
    plain = {f"{TARGET}.weight": torch.randn(6, 4)}
    save_file(plain, base / "model.safetensors")
    if kind == "alone":
        save_file(adapter, actor / layout.LORA_ADAPTER / "adapter_model.safetensors")
    else:
        under = (
            {f"{WRAPPED}.base_layer.weight": w for w in plain.values()} if kind == "whole" else {}
        )
        shard = {n.replace(".weight", ".default.weight"): w for n, w in adapter.items()} | under
        torch.save(shard, actor / layout.shard_name("model", 1, 0))
    return actor, base, (plain[f"{TARGET}.weight"] + 4 * product).half()


@pytest.mark.parametrize("kind", ["alone", "in shards", "whole"])
def test_an_adapter_needs_merge_and_the_base_that_it_lacks(tmp_path, kind):
    actor, base, wanted = of_adapter(tmp_path, kind)
    refused = convert(actor.parent, base)
    assert refused.status == "failed" and "--merge" in refused.message
    if kind != "whole":
        refused = convert(actor.parent, merges=True)
        assert refused.status == "failed" and "--base-model-dir" in refused.message
    assert convert(actor.parent, base, merges=True).status == "converted"
    found = load_file(actor / "huggingface" / "model.safetensors")
    assert found.keys() == {f"{TARGET}.weight"}
    assert torch.equal(found[f"{TARGET}.weight"], wanted)
    assert sorted(p.name for p in (actor / "huggingface").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert convert(actor.parent, base, merges=True).status == "skipped"


def test_an_adapter_without_its_settings_is_named(tmp_path):
    actor, base, _ = of_adapter(tmp_path, "alone")
    (actor / layout.LORA_ADAPTER / "adapter_config.json").unlink()
    outcome = convert(actor.parent, base, merges=True)
    assert outcome.status == "failed" and "adapter_config.json is missing" in outcome.message


def test_weights_of_a_base_are_those_of_its_index(tmp_path):
    """Some makers add their own form (``consolidated.safetensors``), some an adapter."""
    save_file({"of the maker": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load_folder(tmp_path)
    for name in "ab":
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_folder(tmp_path).keys() == {"a", "b"}
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    assert load_folder(tmp_path).keys() == {"w"}


def test_tied_weights_are_written_once_though_the_config_does_not_say_so(tmp_path):
    """As Gemma's: what is usual with a model is not in its config."""
    actor = layout.step_folder(tmp_path, 1) / "actor"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface" / "config.json").write_text(json.dumps({"dtype": "float32"}))
    table = torch.randn(5, 3)
    weights = {"model.embed_tokens.weight": table, "lm_head.weight": table, "n": torch.arange(2)}
    torch.save(weights, actor / layout.shard_name("model", 1, 0))
    assert convert(actor.parent).status == "converted"
    found = load_file(actor / "huggingface" / "model.safetensors")
    assert found.keys() == {"model.embed_tokens.weight", "n"} and found["n"].dtype == torch.int64


def damage_adapter(job: Path) -> Path:
    actor, _, _ = of_adapter(job, "alone")
    (actor / layout.LORA_ADAPTER / "adapter_model.safetensors").write_bytes(b"torn")
    return actor


def of_megatron(job: Path) -> Path:
    """A checkpoint of Megatron's with one weight."""
    actor = layout.step_folder(job, 1) / "actor"
    (job / "base").mkdir(parents=True)
    (job / "base" / "config.json").write_text("{}")
    weights = {"decoder.final_layernorm.weight": torch.ones(9)}
    dcp.save(weights, checkpoint_id=str(actor / "dist_ckpt"), no_dist=True)
    return actor


def damage_megatron(job: Path, name: str) -> Path:
    actor = of_megatron(job)
    [path] = (actor / "dist_ckpt").glob(name)
    path.write_bytes(path.read_bytes()[:40])
    return actor


@pytest.mark.parametrize(
    "damaged",
    [
        damage_adapter,
        lambda job: damage_megatron(job, "*.distcp"),
        lambda job: damage_megatron(job, ".metadata"),
    ],
)
def test_damaged_files_are_told_and_the_others_go_on(tmp_path, damaged):
    actor = damaged(tmp_path)
    outcome = convert(actor.parent, tmp_path / "base", merges=True)
    assert outcome.status == "failed" and outcome.message


@pytest.mark.parametrize("name", ["decoder.rotary", "decoder.layers.mlp.router.weight"])
def test_what_is_not_of_the_llama_family_is_named(tmp_path, name):
    dcp.save({name: torch.ones(2, 2)}, checkpoint_id=str(tmp_path / "dist_ckpt"), no_dist=True)
    with pytest.raises(ValueError, match=f"holds '{name.removeprefix('decoder.layers.')}', which"):
        load_dist_checkpoint(tmp_path / "dist_ckpt", {})


def test_layers_that_are_not_stacked_are_read_too(tmp_path):
    """With as many key heads as there are heads, where the config names none."""
    parts = torch.arange(2 * 3 * 2 * 4.0).view(2, 3, 2, 4)  # heads, (query, key, value), size
    name = "model.decoder.layers.7.self_attention.linear_qkv.weight"
    weights = {name: parts.reshape(-1, 4), "optimizer.state": torch.ones(1)}
    dcp.save(weights, checkpoint_id=str(tmp_path / "dist_ckpt"), no_dist=True)
    found = load_dist_checkpoint(tmp_path / "dist_ckpt", {"num_attention_heads": 2})
    assert found.keys() == {f"model.layers.7.self_attn.{letter}_proj.weight" for letter in "qkv"}
    for place, letter in enumerate("qkv"):
        whole = found[f"model.layers.7.self_attn.{letter}_proj.weight"]
        assert torch.equal(whole, parts[:, place].reshape(4, 4))


class Evil:
    def __reduce__(self):
        return (print, ("run",))


def test_code_in_megatrons_table_of_contents_is_not_run(tmp_path, capsys):
    path = of_megatron(tmp_path) / "dist_ckpt" / ".metadata"
    contents = pickle.loads(path.read_bytes())
    contents.planner_data = Evil()
    path.write_bytes(pickle.dumps(contents))
    with pytest.raises(ValueError, match=r"it names builtins\.print, which is no part"):
        load_dist_checkpoint(path.parent, {})
    assert capsys.readouterr().out == ""


def test_megatrons_own_class_of_contents_is_read_without_megatron(tmp_path, monkeypatch):
    """As version 0.15 wrote it."""
    path = of_megatron(tmp_path) / "dist_ckpt" / ".metadata"
    contents = pickle.loads(path.read_bytes())
    name = "megatron.contents"
    own = type("MCoreMetadata", (type(contents),), {"__module__": name})
    contents.__class__ = own
    with monkeypatch.context() as patch:
        module = ModuleType(name)
        module.MCoreMetadata = own
        patch.setitem(sys.modules, "megatron", ModuleType("megatron"))
        patch.setitem(sys.modules, name, module)
        path.write_bytes(pickle.dumps(contents))
    assert torch.equal(load_dist_checkpoint(path.parent, {})["model.norm.weight"], torch.ones(9))


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
