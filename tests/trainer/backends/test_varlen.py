"""Where packed tokens stand as keys, and which models suit FlashAttention 4."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.trainer.toy import groups, multi_turn
from trinity.trainer.backends.torch.packing import pack_rows
from trinity.trainer.backends.torch.varlen import (
    plan_varlen,
    suits_flash_attention_4,
    use_flash_attention_4,
)
from trinity.trainer.batch import TrainBatch

SIZES = {"vocab_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}


@pytest.mark.parametrize(("hidden", "suits"), [(128, True), (256, True), (32, False)])
def test_heads_of_known_sizes_suit_it(hidden, suits):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(hidden_size=hidden, **heads, **SIZES))
    assert suits_flash_attention_4(model) is suits


def test_layers_that_see_a_window_do_not():
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128}
    given = {**heads, **SIZES}
    assert not suits_flash_attention_4(MistralForCausalLM(MistralConfig(sliding_window=8, **given)))
    assert suits_flash_attention_4(MistralForCausalLM(MistralConfig(sliding_window=None, **given)))
    assert suits_flash_attention_4(Qwen2ForCausalLM(Qwen2Config(sliding_window=8, **given)))


def test_without_the_package_pytorchs_own_kernels_stay():
    assert not use_flash_attention_4([])


@pytest.mark.parametrize("rows", [lambda: groups(3, 4, prompt=40, response=20), multi_turn])
def test_a_plan_names_every_place_where_a_token_is_a_key(rows):
    packed = pack_rows(TrainBatch.from_experiences(rows()))
    plan = plan_varlen(packed.segments, torch.device("cpu"))
    ends = [*plan.offsets.tolist()[1:], len(plan.slots)]
    assert sorted(plan.slots.tolist()) == list(range(len(plan.key_index)))
    for token, (first, end) in enumerate(zip(plan.offsets.tolist(), ends, strict=True)):
        wanted = [place for place, key in enumerate(plan.key_index.tolist()) if key == token]
        assert plan.slots[first:end].tolist() == wanted


def test_keys_of_rows_that_share_nothing_are_the_packed_row():
    packed = pack_rows(TrainBatch.from_experiences(groups(3, 1, prompt=40, response=20)))
    longest = max(len(segment.tokens) for segment in packed.segments)
    plan = plan_varlen(packed.segments, torch.device("cpu"))
    assert plan.counts.tolist() == [longest, longest, 0]
