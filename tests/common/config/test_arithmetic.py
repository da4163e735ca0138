"""The numbers `trinity explain` shows."""

from dataclasses import replace

import pytest

from tests.common.config.files import with_edits
from tests.shapes import QWEN_1_5B, shape_folder
from trinity.algorithm.sample_strategy.mix import MixSampleStrategy
from trinity.common.config import Config, derive, memory, split_gpus
from trinity.common.config.arithmetic import arithmetic_of, max_staleness, rollouts_per_step
from trinity.common.config.gpus import gpu_problems, near_batches
from trinity.common.config.memory import checkpoint_bytes, engine_memory, trainer_memory
from trinity.common.config.shape import ModelShape, find_shape, guess_shape, shape_of


def filled(edits):
    return derive(Config.model_validate(with_edits(edits))).config


def numbers(edits):
    config = filled(edits)
    cluster = config.cluster
    return arithmetic_of(config, split_gpus(config, cluster.node_num, cluster.gpu_per_node))


def test_a_synchronous_step():
    got = numbers({})
    assert (got.tasks, str(got.samples), str(got.experiences)) == (4, "8", "32")
    assert (got.prompt_tokens, got.response_tokens) == (4 * 64, 32 * 64)
    assert (got.train_batch, got.train_tokens) == (32, 32 * 128)
    assert (got.copies, got.rows_per_gpu, got.micro_batches) == (4, 8, 4)
    assert (str(got.steps_per_explorer_step), got.max_staleness) == ("1", 0)
    assert numbers({"buffer.train_batch_size": 30}).rows_per_gpu == 8  # of the fullest of four


def test_tasksets_with_other_numbers_of_samples_make_a_span():
    tasksets = [{"path": f"/{count}", "repeat_times": count} for count in (4, 16, None)]
    got = numbers({"buffer.explorer_input": {"tasksets": tasksets}, "buffer.train_batch_size": 24})
    assert (str(got.samples), str(got.experiences)) == ("4 to 16", "16 to 64")
    assert got.response_tokens == 64 * 64  # at most
    assert (str(got.steps_per_explorer_step), got.max_staleness) == ("0.67 to 2.67", 2)


def test_sequence_parallel_and_row_limited_micro_batches():
    edits = {
        "trainer.ulysses_sequence_parallel_size": 2,
        "trainer.use_dynamic_bsz": False,
        "trainer.trainer_config": {"actor": {"ppo_micro_batch_size_per_gpu": 3}},
    }
    got = numbers(edits)
    assert (got.copies, got.rows_per_gpu, got.micro_batches) == (2, 16, 6)


@pytest.mark.parametrize(
    ("interval", "offset", "batch", "stale"),
    [(1, 0, 32, 0), (4, 0, 32, 3), (4, 1, 32, 4), (1, 1, 32, 1), (1, 0, 16, 1), (2, 0, 16, 3)],
)
def test_how_stale_data_gets(interval, offset, batch, stale):
    edits = {
        "synchronizer": {"sync_interval": interval, "sync_offset": offset},
        "buffer.train_batch_size": batch,
    }
    assert numbers(edits).max_staleness == stale


def test_staleness_is_unbounded_in_free_styles_but_for_the_control():
    edits = {"synchronizer": {"sync_style": "explorer_driven"}}
    assert max_staleness(filled(edits)) is None
    edits["algorithm.sample_strategy"] = "staleness_control"
    edits["algorithm.sample_strategy_args"] = {"max_staleness": 3}
    assert max_staleness(filled(edits)) == 3


def test_gpus_are_split():
    edits = {
        "explorer.rollout_model": {"engine_num": 2, "tensor_parallel_size": 2},
        "explorer.auxiliary_models": [{"model_path": "/j", "data_parallel_size": 2}],
    }
    split = split_gpus(filled(edits), 2, 8)
    assert (split.rollout, split.auxiliary, split.trainer, split.total) == (4, 2, 10, 16)
    assert gpu_problems(filled(edits), 2, 8)[0].key == "cluster.node_num"
    shared = split_gpus(filled({"mode": "colocate"}), 1, 4)
    assert (shared.rollout, shared.trainer) == (1, 4)


def test_services_take_no_gpus():
    edits = {"explorer.auxiliary_models": [{"model_path": "/j", "engine_type": "openai"}]}
    assert split_gpus(filled(edits), 1, 8).auxiliary == 0


def test_batches_that_would_divide():
    assert near_batches(30, 4, 8) == [24, 32, 40]
    assert all(size % 3 == 0 for size in near_batches(32, 3, 8))
    assert near_batches(10**18 + 6, 4, 8) == [10**18, 10**18 + 8, 10**18 + 16]
    assert near_batches(1, 4, 8) == [8, 16, 24]


def test_shape_of_a_known_model():
    shape = shape_of(QWEN_1_5B)
    assert shape is not None
    assert shape.parameters == pytest.approx(1.544e9, rel=0.01)
    assert (shape.kv, shape.query) == (256, 1536)


def test_shape_from_a_folder_and_from_a_name(tmp_path):
    found = find_shape(shape_folder(tmp_path, QWEN_1_5B))
    assert found is not None
    assert not found.is_guess
    guessed = guess_shape("Qwen/Qwen2.5-7B-Instruct")
    assert guessed is not None
    assert (guessed.parameters, guessed.is_guess) == (7_000_000_000, True)
    assert guess_shape("SmolLM2-135M").parameters == 135_000_000
    assert guess_shape("my-model") is None


def test_memory_of_a_training_gpu():
    shape = shape_of(QWEN_1_5B)
    one = {part.name: part.bytes for part in trainer_memory(filled({}), shape, 1)}
    four = {part.name: part.bytes for part in trainer_memory(filled({}), shape, 4)}
    assert one["actor weights"] == 2 * shape.parameters
    assert one["actor optimizer"] == 12 * shape.parameters
    assert four["actor optimizer"] == one["actor optimizer"] / 4
    assert one["reference weights"] == 2 * shape.parameters
    plain = filled({"algorithm.kl_loss_fn": "none"})
    assert "reference weights" not in {part.name for part in trainer_memory(plain, shape, 1)}
    frugal = filled({"trainer.enable_gradient_checkpointing": True})
    less = {part.name: part.bytes for part in trainer_memory(frugal, shape, 1)}
    assert less["activations"] < one["activations"] / 4
    away = {
        part.name: part.bytes
        for part in trainer_memory(filled({"trainer.offload_policy": True}), shape, 4)
    }
    assert away["actor weights"] == away["actor optimizer"] == 0
    delta = trainer_memory(filled({"synchronizer": {"delta": True}}), shape, 4)
    assert 2 * shape.parameters in [p.bytes for p in delta if "before" in p.name]


def test_ranks_hold_small_models_whole_for_a_step():
    shape = shape_of(QWEN_1_5B)
    whole = 2 * shape.parameters

    def parts(gpu_gib, **edits):
        found = trainer_memory(filled(edits), shape, 2, gpu_gib * 2**30)
        return {part.name: part.bytes for part in found}

    many = {"buffer.train_batch_size": 512, "trainer.max_token_len_per_gpu": 1024}
    on_large, on_small = parts(141, **many), parts(80, **many)
    assert on_large["gathered layers"] == whole > on_small["gathered layers"]
    own = 2 * shape.parameters  # half of them in float32
    assert on_small["gradients"] == own
    in_passes = on_large["activations"] + on_large["logits in chunks"]
    sent = 8 * shape.parameters  # once these are gone: the sums, and a copy of them
    assert on_large["gradients"] == own + max(4 * shape.parameters, sent - in_passes)
    few = {"trainer.max_token_len_per_gpu": 8192, "buffer.train_batch_size": 4}
    at_once = parts(141, **few)  # nothing waits for a last pass
    in_passes = at_once["activations"] + at_once["logits in chunks"]
    assert at_once["gradients"] == own + 6 * shape.parameters - in_passes
    others = [{"trainer.trainer_type": "verl"}]
    others += [{f"trainer.{key}": True} for key in ("param_offload", "offload_policy")]
    for edits in others:
        assert parts(141, **many, **edits)["gathered layers"] < whole


def test_memory_of_a_gpu_of_megatron():
    shape = shape_of(QWEN_1_5B)
    megatron = {"trainer.trainer_type": "verl", "trainer.trainer_strategy": "megatron"}
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    one = {p.name: p.bytes for p in trainer_memory(filled(megatron), shape, 1)}
    cut = filled({**megatron, "trainer.megatron": sizes})
    eight = {p.name: p.bytes for p in trainer_memory(cut, shape, 8)}
    assert one["actor weights"] == 4 * eight["actor weights"] == 2 * shape.parameters
    assert one["actor gradients"] == 4 * eight["actor gradients"] == 4 * shape.parameters
    assert one["actor optimizer"] == 8 * eight["actor optimizer"] == 12 * shape.parameters
    assert one["activations"] == 2 * eight["activations"]
    assert one["logits"] == 2 * eight["logits"]
    frugal = filled({**megatron, "trainer.enable_gradient_checkpointing": True})
    less = {p.name: p.bytes for p in trainer_memory(frugal, shape, 1)}
    assert less["activations"] < one["activations"] / 4


QWEN3_0_6B = {
    **QWEN_1_5B,
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
}


@pytest.mark.parametrize(
    ("model", "rows", "tokens", "peak"),
    [(QWEN_1_5B, 8, 8192, 40.06), (QWEN_1_5B, 32, 8192, 44.98), (QWEN3_0_6B, 16, 16384, 32.48)],
)
def test_memory_of_a_trainer_on_a_gpu_is_what_was_measured(model, rows, tokens, peak):
    """Peaks in GiB of compiled steps on an H200: one pack, four packs, and one of a Qwen3."""
    config = filled(
        {
            "cluster": {"node_num": 1, "gpu_per_node": 1},
            "algorithm.kl_loss_fn": "none",
            "model": {"max_model_len": 1024, "max_response_tokens": 896},
            "buffer.train_batch_size": rows,
            "trainer.max_token_len_per_gpu": tokens,
            "trainer.enable_shared_prefix": False,
            "trainer.dtype": "bfloat16",
        }
    )
    found = sum(part.bytes for part in trainer_memory(config, shape_of(model), 1)) / 2**30
    assert found == pytest.approx(peak, rel=0.02)


def test_gradients_beside_a_pass():
    shape = shape_of(QWEN_1_5B)

    def gradients(**edits):
        config = filled({"cluster": {"node_num": 1, "gpu_per_node": 1}, **edits})
        [part] = [p for p in trainer_memory(config, shape, 1) if p.name == "gradients"]
        return part.bytes

    table = 4 * shape.vocabulary * shape.hidden
    many = {"buffer.train_batch_size": 512, "trainer.max_token_len_per_gpu": 1024}
    assert gradients(**many) == 4 * shape.parameters
    assert gradients(**many, **{"trainer.optimizer_offload": True}) == table
    few = {"trainer.max_token_len_per_gpu": 8192, "buffer.train_batch_size": 4}
    small = gradients(**few)  # so few tokens that in the end all gradients are more than these
    assert table < small < 4 * shape.parameters


SMOL = ModelShape(134_515_008, 30, 576, 1536, 192, 576, 49152)


@pytest.mark.parametrize(
    ("edits", "is_joined"),
    [
        ({}, True),
        ({"trainer.dtype": "float32"}, False),
        ({"trainer.num_processes": 2}, False),
        ({"model.lora_configs": [{"lora_rank": 8}]}, False),
    ],
)
def test_layers_in_one_call_keep_no_norms_where_the_processor_has_them(
    monkeypatch, edits, is_joined
):
    saved = 1000 * 30 * 4 * 576  # what comes out of two norms of each layer, in bfloat16

    def activations(has_products, shape=SMOL):
        monkeypatch.setattr(memory, "has_own_products", lambda: has_products)
        given = {
            "cluster": {"gpu_per_node": 0},
            "explorer.rollout_model.engine_type": "torch",
            "trainer": {"dtype": "bfloat16", "max_token_len_per_gpu": 1000},
            **edits,
        }
        config = filled(given)
        shards = config.trainer.num_processes or 1
        parts = {part.name: part.bytes for part in trainer_memory(config, shape, shards)}
        return parts["activations"]

    assert activations(False) - activations(True) == (saved if is_joined else 0)
    other = replace(SMOL, is_joinable=False)
    assert activations(False, other) == activations(True, other)


def test_memory_of_a_trainer_on_a_cpu_is_what_was_measured(monkeypatch):
    """Peaks of a process of two steps, in MB: 16 layers of 256, 8 of 512, and SmolLM2-135M.

    That was before layers were computed in one call.
    """
    monkeypatch.setattr(memory, "has_own_products", lambda: False)
    narrow = ModelShape(18_825_472, 16, 256, 1024, 256, 256, 8000)
    wide = ModelShape(41_565_696, 8, 512, 1536, 256, 512, 32000)
    for shape, dtype, tokens, peak in (
        (narrow, "float32", 4096, 1812),
        (wide, "float32", 4096, 2036),
        (wide, "bfloat16", 2048, 1305),
        (SMOL, "bfloat16", 640, 2752),
        (SMOL, "bfloat16", 1000, 2870),
    ):
        sync = {"synchronizer.sync_method": "checkpoint"}
        assert trainer_mb(shape, dtype, tokens, 64, 256, **sync) == pytest.approx(peak, rel=0.1)


def test_memory_of_a_trainer_in_a_run_on_a_cpu_is_what_was_measured():
    """Peaks of the trainer's process: `benchmarks/cpu_grpo.yaml`, and the quick start."""
    tiny = ModelShape(407_424, 2, 128, 256, 128, 128, 102)
    assert trainer_mb(SMOL, "bfloat16", 1280, 64, 128) == pytest.approx(3645, rel=0.1)
    quickstart = {"algorithm.repeat_times": 16, "buffer.batch_size": 32}
    assert trainer_mb(tiny, "float32", 16384, 12, 18, **quickstart) == pytest.approx(464, rel=0.1)


def trainer_mb(shape, dtype, tokens, prompt, longest, **edits):
    config = filled(
        {
            "cluster": {"gpu_per_node": 0},
            "algorithm.kl_loss_fn": "none",
            "explorer.rollout_model.engine_type": "torch",
            "model.max_model_len": longest,
            "model.max_prompt_tokens": prompt,
            "synchronizer.sync_method": "memory",
            "trainer": {"dtype": dtype, "max_token_len_per_gpu": tokens},
            **edits,
        }
    )
    return sum(part.bytes for part in trainer_memory(config, shape, 1)) / 2**20


def test_memory_of_a_critic_and_of_an_adapter():
    shape = shape_of(QWEN_1_5B)
    ppo = filled({"algorithm": {"algorithm_type": "ppo"}})
    assert "critic optimizer" in {part.name for part in trainer_memory(ppo, shape, 1)}
    lora = filled({"model.lora_configs": [{"lora_rank": 8}]})
    parts = {part.name: part.bytes for part in trainer_memory(lora, shape, 1)}
    assert parts["actor optimizer"] < shape.parameters * 0.2
    assert checkpoint_bytes(lora, shape)[0] < checkpoint_bytes(filled({}), shape)[0] / 20


def test_memory_of_an_engine_adds_up():
    model = filled({}).explorer.rollout_model
    parts = engine_memory(model, shape_of(QWEN_1_5B), 80 * 2**30)
    assert sum(part.bytes for part in parts) == pytest.approx(72 * 2**30)


@pytest.mark.parametrize("args", [{}, {"expert_data_ratio": 0.1}, {"expert_data_ratio": 1}])
def test_rollouts_of_a_mixed_batch_are_what_its_strategy_reads(args):
    edits = {"algorithm.sample_strategy": "mix", "algorithm.sample_strategy_args": args}
    config = Config.model_validate(with_edits({**edits, "buffer.train_batch_size": 7}))
    strategy = MixSampleStrategy(None, 7, {"sft_dataset": None}, **args)
    assert rollouts_per_step(config) == 7 - strategy.num_expert
