"""What is refused before a trainer starts, each with its numbers."""

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.common.models import moe
from tests.trainer.toy import tiny_config
from trinity.checkpoint import layout
from trinity.common.config import Config
from trinity.common.constants import Mode
from trinity.launcher import check_verl
from trinity.launcher.build_engine import torch_settings
from trinity.launcher.build_train_engine import _settings as trainer_settings
from trinity.launcher.check_megatron import megatron_problems
from trinity.launcher.check_trainer import divides, trainer_problems
from trinity.launcher.checks import find_start_problems
from trinity.launcher.gpu_needs import GpuNeeds
from trinity.launcher.plan import RunPlan, make_plan


@pytest.fixture(autouse=True)
def no_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Development environments have TRL, beside which veRL is refused."""
    monkeypatch.setattr(check_verl, "unusable_trl", lambda: None)


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    return plan_of(tmp_path)


def plan_of(root: Path, **sections: object) -> RunPlan:
    tiny_config().save_pretrained(root / "model")
    config = {
        "checkpoint_root_dir": str(root / "jobs"),
        "model": {"model_path": str(root / "model"), "max_model_len": 64},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
        "buffer": {"batch_size": 2, "total_steps": 1},
        "explorer": {"rollout_model": {"engine_type": "torch"}},
        **sections,
    }
    if "lora" in config:
        config["model"]["lora_configs"] = [config.pop("lora")]
    return make_plan(Config.model_validate(config), found_gpus=0)


def messages(plan: RunPlan) -> list[str]:
    return [f"{p.key}: {p.message} {p.fix}" for p in trainer_problems(plan)]


def test_a_sound_plan_has_no_problem(plan):
    assert messages(plan) == []


def test_routes_of_a_model_without_experts_are_refused(tmp_path):
    grpo = {"algorithm_type": "grpo", "repeat_times": 2, "enable_router_replay": True}
    plan = plan_of(tmp_path, algorithm=grpo)
    [found] = messages(plan)
    assert "enable_router_replay: The model (llama) has no experts" in found
    moe.qwen().save_pretrained(tmp_path / "model")
    assert messages(plan) == []
    model = plan.config.explorer.rollout_model
    assert torch_settings(plan.config, model, 1, "cpu").returns_routes
    assert trainer_settings(plan, None).replays_routes


def test_heads_and_ranks_that_do_not_divide_are_refused_with_what_would(tmp_path):
    plan = plan_of(tmp_path, trainer={"num_processes": 6, "ulysses_sequence_parallel_size": 3})
    [found] = messages(plan)
    assert "3 ranks" in found and "4 attention heads and 2 key heads" in found and "1, 2" in found
    plan = plan_of(tmp_path, trainer={"num_processes": 3, "ulysses_sequence_parallel_size": 2})
    [found] = messages(plan)
    assert "2 ranks share a sequence, and the trainer has 3" in found
    assert found.endswith("Set it to 1."), "3 ranks could not share the heads"
    gpus = replace(plan, gpus=GpuNeeds(0, 0, 4, 4))
    assert messages(gpus) == []
    shared = plan.config.model_copy(update={"mode": Mode.COLOCATE})
    assert messages(replace(plan, config=shared, gpus=GpuNeeds(4, 0, 0, 4))) == []
    assert divides(8, 32, 4) and not divides(8, 12, 4)


def test_an_engine_that_takes_its_number_format_from_the_folder_must_fit(tmp_path):
    engine = {"rollout_model": {"engine_type": "torch", "dtype": "auto"}}
    [found] = messages(plan_of(tmp_path, explorer=engine))
    assert "own is float32, but `trainer.dtype` is bfloat16. Set `dtype: bfloat16`." in found
    assert messages(plan_of(tmp_path, explorer=engine, trainer={"dtype": "float32"})) == []


def test_batches_that_ranks_cannot_share_evenly_are_refused_with_what_would(tmp_path):
    uneven = {"batch_size": 3, "train_batch_size": 7, "total_steps": 1}
    rows = {"actor_rollout_ref": {"actor": {"ppo_micro_batch_size_per_gpu": 2}}}
    for exact in (
        {"use_dynamic_bsz": False, "trainer_config": rows},
        {"trainer_type": "verl"},
    ):
        plan = plan_of(tmp_path, trainer={"num_processes": 2, **exact}, buffer=uneven)
        [found] = messages(plan)
        assert "7 experiences a step" in found and "over 2 ranks" in found
        assert "one of 4, 6, 8" in found
    plan = plan_of(tmp_path, trainer={"num_processes": 2}, buffer=uneven)
    assert messages(plan) == []


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path, plan):
    tokenizer = {"model": {"vocab": {"a": 0, "b": 96}}, "added_tokens": [{"id": 97}]}
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(tokenizer))
    [found] = messages(plan)
    assert "ids up to 97, but the embedding has 97 rows" in found
    (tmp_path / "model/tokenizer.json").unlink()
    (tmp_path / "model/vocab.json").write_text(json.dumps({"a": 0, "b": 96}))
    assert messages(plan) == []
    added = {"added_tokens_decoder": {"99": {"content": "<new>"}}}
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(added))
    [found] = messages(plan)
    assert "ids up to 99" in found


def test_a_checkpoint_of_another_model_is_refused(plan):
    folder = plan.job.path / "global_step_3" / layout.ACTOR
    tiny_config(hidden_size=64).save_pretrained(folder / layout.HUGGING_FACE)
    (folder / layout.shard_name("model", 1, 0)).touch()
    [found] = messages(plan)
    assert (
        "global_step_3 is of another architecture: its hidden_size is 64, and the model's is 32"
        in found
    )
    tiny_config().save_pretrained(folder / layout.HUGGING_FACE)
    assert messages(plan) == []
    (folder / layout.LORA_ADAPTER).mkdir()
    [found] = messages(plan)
    assert "is of an adapter, and the file asks for a whole model" in found


def test_a_checkpoint_that_the_critic_cannot_go_on_from_is_refused(tmp_path):
    plan = plan_of(tmp_path, algorithm={"algorithm_type": "ppo", "repeat_times": 2})
    folder = plan.job.path / "global_step_3"
    for role in (layout.ACTOR, layout.CRITIC):
        assert role == layout.ACTOR or "global_step_3 has no critic" in messages(plan)[0]
        tiny_config().save_pretrained(folder / role / layout.HUGGING_FACE)
        (folder / role / layout.shard_name("model", 1, 0)).touch()
    assert messages(plan) == []
    other = tiny_config(num_hidden_layers=1)
    other.save_pretrained(folder / layout.CRITIC / layout.HUGGING_FACE)
    [found] = messages(plan)
    assert "critic of global_step_3 is of another architecture: its num_hidden_layers is 1" in found


def test_an_adapter_for_modules_that_are_not_there_is_refused(tmp_path):
    plan = plan_of(tmp_path, lora={"target_modules": ["q_proj", "q_porj"]})
    [found] = messages(plan)
    assert "'q_porj', which is none of the model's 14 linear modules" in found and "q_proj" in found
    assert "lm_head" not in found
    for target in (["q_proj", "lm_head"], "lm_.*"):
        [found] = messages(plan_of(tmp_path, lora={"target_modules": target}))
        assert "names the output layer, which gets no adapter" in found
    [found] = messages(plan_of(tmp_path, lora={"path": str(tmp_path)}))
    assert "no adapter_config.json" in found
    [found] = messages(plan_of(tmp_path, lora={"name": "my.adapter"}))
    assert "letters, digits" in found
    assert messages(plan_of(tmp_path, lora={})) == []


def test_what_verl_cannot_do_is_refused(tmp_path):
    verl = {"trainer_type": "verl", "num_processes": 2}
    assert messages(plan_of(tmp_path, trainer=verl)) == []
    megatron = {**verl, "trainer_strategy": "megatron"}
    found = messages(plan_of(tmp_path, trainer=megatron))
    assert any("Megatron computes on GPUs only. Set `trainer_strategy: fsdp2`." in m for m in found)
    shared = {**verl, "ulysses_sequence_parallel_size": 2}
    [found] = messages(plan_of(tmp_path, trainer=shared))
    assert "flash-attn" in found and "trainer_type: torch" in found
    [found] = messages(plan_of(tmp_path, trainer=verl, lora={"lora_rank": 4}))
    assert "built-in trainer" in found


MEGATRON_REFUSES = {
    "missing": ({}, "'megatron-core' is not installed. Install it with pip install 'trinity-rft["),
    "dtype": ({"dtype": "float32"}, "computes in bfloat16, not float32"),
    "writers": ({"save_strategy": "single_process"}, "write a checkpoint together"),
    "fsdp2's": ({"offload_policy": True}, "a setting of FSDP2"),
    "gradients": ({"grad_offload": True}, "together with the parameters"),
    "heads": (
        {"megatron": {"tensor_model_parallel_size": 3}},
        "3 GPUs share each matrix, but can't share the model's 4 attention heads and 2 key heads "
        "evenly. Set it to one of 1, 2.",
    ),
    "vocabulary": (
        {"megatron": {"tensor_model_parallel_size": 2}},
        "2 GPUs can't share the 97 rows of the vocabulary evenly. Set it to 1.",
    ),
    "layers": (
        {"megatron": {"pipeline_model_parallel_size": 4}},
        "The model's 2 layers can't be cut into 4 chunks of one length. "
        "Make stages times chunks of a stage one of 1, 2.",
    ),
    "chunks": (
        {"megatron": {"virtual_pipeline_model_parallel_size": 2}},
        "Chunks of a stage need several stages, and there is one.",
    ),
    "chunks of a tied model": (
        {
            "megatron": {
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
            }
        },
        "whose output layer is its embedding (tie_word_embeddings). Remove it.",
    ),
    "experts": ({"megatron": {"expert_model_parallel_size": 2}}, "has no experts to share"),
    "matrices of experts": (
        {"megatron": {"expert_tensor_parallel_size": 1}},
        "expert_tensor_parallel_size: The model has no experts to share",
    ),
    "going on": ({"on_save_error": "continue"}, "if one fails, none can go on. Set it to `stop`."),
    "padding": (
        {"megatron": {"context_parallel_size": 2}, "use_remove_padding": False},
        "trainer.use_remove_padding: 2 GPUs share each sequence, which veRL does for packed "
        "sequences only. Remove it, or set `megatron.context_parallel_size: 1`.",
    ),
}


@pytest.mark.parametrize("what", list(MEGATRON_REFUSES))
def test_what_megatron_cannot_do_is_refused(tmp_path, what):
    edits, text = MEGATRON_REFUSES[what]
    if what == "missing" and find_spec("megatron") is not None:
        pytest.skip("megatron-core is installed")
    trainer = {"trainer_type": "verl", "trainer_strategy": "megatron", **edits}
    assert any(text in found for found in messages(plan_of(tmp_path, trainer=trainer)))


EXPERTS_REFUSE = {
    "none": ({"expert_model_parallel_size": 2}, []),
    "uneven": (
        {"expert_model_parallel_size": 4},
        ["4 GPUs can't share the model's 6 experts evenly. Set it to one of 1, 2, 3."],
    ),
    "columns": (
        {"expert_tensor_parallel_size": 4},
        ["4 GPUs can't share the 70 columns of an expert evenly. Set it to one of 1, 2."],
    ),
    "gpus": (
        {"expert_model_parallel_size": 3},
        [
            "The experts take 3 x 1 x 1 GPUs (expert parallel, expert tensor parallel, stages), "
            "of which the trainer's 4 are no multiple. Set it to one of 1, 2."
        ],
    ),
    "too many": (
        {"expert_tensor_parallel_size": 5, "pipeline_model_parallel_size": 2},
        ["take 1 x 5 x 2 GPUs", "Set `expert_tensor_parallel_size: 1`."],
    ),
    "sequence": (
        {"tensor_model_parallel_size": 2, "sequence_parallel": False},
        ["sequence_parallel: Megatron trains experts on 2 tensor parallel GPUs with it only."],
    ),
}


@pytest.mark.parametrize("what", list(EXPERTS_REFUSE))
def test_experts_are_held_against_gpus_and_the_model(tmp_path, what):
    edits, texts = EXPERTS_REFUSE[what]
    trainer = {"trainer_type": "verl", "trainer_strategy": "megatron", "megatron": edits}
    plan = replace(plan_of(tmp_path, trainer=trainer), gpus=GpuNeeds(0, 0, 4, 4))
    shape = {"num_experts": 6, "moe_intermediate_size": 70, "intermediate_size": 64}
    found = [f"{p.key}: {p.message} {p.fix}" for p in megatron_problems(plan, shape)]
    found = [text for text in found if "not installed" not in text]
    assert len(found) == bool(texts), found
    assert all(text in found[0] for text in texts)


def test_a_checkpoint_of_another_format_is_refused(tmp_path):
    megatron = {"trainer_type": "verl", "trainer_strategy": "megatron"}
    plans = plan_of(tmp_path), plan_of(tmp_path, trainer=megatron)
    actor = plans[0].job.path / "global_step_3" / layout.ACTOR
    (actor / "model" / layout.DIST_CHECKPOINT).mkdir(parents=True)
    is_told = [any("global_step_3 is Megatron's" in m for m in messages(plan)) for plan in plans]
    assert is_told == [True, False]
    shutil.rmtree(actor / "model")
    (actor / layout.shard_name("model", 1, 0)).touch()
    is_told = [any("is not Megatron's" in m for m in messages(plan)) for plan in plans]
    assert is_told == [False, True]


def test_megatron_reads_the_rotary_embedding_from_the_model_alone(tmp_path):
    trainer = {"trainer_type": "verl", "trainer_strategy": "megatron"}
    model = {"model_path": str(tmp_path / "model"), "max_model_len": 64, "rope_theta": 1e6}
    found = messages(plan_of(tmp_path, trainer=trainer, model=model))
    assert any("model.rope_theta: " in m and "config.json" in m for m in found)


def test_a_folder_that_holds_no_named_adapter_is_refused_at_start(tmp_path):
    modules = [{"name": "polite", "path": str(tmp_path)}]
    engine = {"engine_type": "torch", "enable_openai_api": True, "lora_modules": modules}
    plan = plan_of(tmp_path, explorer={"rollout_model": engine})
    found = {problem.key: problem.message for problem in find_start_problems(plan.config)}
    assert "no adapter_config.json" in found["explorer.rollout_model.lora_modules.0.path"]


@pytest.mark.skipif(find_spec("verl") is not None, reason="veRL is installed")
def test_without_verl_the_start_names_the_extra(tmp_path):
    plan = plan_of(tmp_path, trainer={"trainer_type": "verl"})
    [found] = [p for p in find_start_problems(plan.config) if p.key == "trainer.trainer_type"]
    assert "'verl' is not installed" in found.message and "trinity-rft[verl]" in found.fix
