"""Which models may have attention computed by FlashAttention 4."""

import pytest
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from trinity.trainer.backends.torch.varlen import suits_flash_attention_4, use_flash_attention_4

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
