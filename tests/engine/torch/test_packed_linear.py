import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.toy import tiny_config
from trinity.engine.torch.packed_linear import PackedLinear, pack_linears_inplace, packed_layers
from trinity.engine.torch.weights import load_weights_inplace


@pytest.fixture
def models():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160}
    plain = AutoModelForCausalLM.from_config(tiny_config(**sizes), dtype=torch.bfloat16).eval()
    packed = copy.deepcopy(plain)
    if not pack_linears_inplace(packed, packed.get_output_embeddings()):
        pytest.skip("this PyTorch packs no bfloat16 weights on this CPU")
    return plain, packed


@torch.inference_mode()
@pytest.mark.parametrize("num_tokens", [8, 64, 200])
def test_packed_layers_give_the_same_bits(models, num_tokens):
    plain, packed = models
    assert len(list(packed_layers(packed))) == 14
    ids = torch.randint(3, 97, (1, num_tokens))
    assert torch.equal(packed(input_ids=ids).logits, plain(input_ids=ids).logits)


@torch.inference_mode()
def test_packed_layers_follow_the_weights(models):
    plain, packed = models
    for parameter in plain.parameters():
        parameter.mul_(1.5)
    load_weights_inplace(packed, plain.named_parameters())
    ids = torch.randint(3, 97, (1, 16))
    assert torch.equal(packed(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_names_stay_and_the_output_layer_is_not_copied(models):
    plain, packed = models
    assert [n for n, _ in packed.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert not isinstance(packed.get_output_embeddings(), PackedLinear)


def test_float32_is_left_alone():
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32)
    assert pack_linears_inplace(model, None) == 0
