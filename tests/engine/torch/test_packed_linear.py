import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.toy import tiny_config
from trinity.common.models.lean import make_lean_inplace
from trinity.engine.torch.packed_linear import PackedLinear, pack_linears_inplace, packed_layers
from trinity.engine.torch.weights import load_weights_inplace, model_digest


@pytest.fixture
def models():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160}
    plain = AutoModelForCausalLM.from_config(tiny_config(**sizes), dtype=torch.bfloat16).eval()
    make_lean_inplace(plain)
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


def test_names_stay(models):
    plain, packed = models
    assert [n for n, _ in packed.named_parameters()] == [n for n, _ in plain.named_parameters()]


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_output_layer_is_packed_and_follows_the_embedding(is_tied):
    config = tiny_config(hidden_size=64, tie_word_embeddings=is_tied)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    make_lean_inplace(plain)
    packed = copy.deepcopy(plain)
    if not pack_linears_inplace(packed, packed.get_output_embeddings()):
        pytest.skip("this PyTorch packs no bfloat16 weights on this CPU")
    head, embedding = packed.get_output_embeddings(), packed.get_input_embeddings()
    assert isinstance(head, PackedLinear)
    assert (head.weight is embedding.weight) == is_tied
    with torch.no_grad():
        plain.get_output_embeddings().weight.mul_(1.5)
    digest = load_weights_inplace(packed, plain.named_parameters())
    assert digest == model_digest(plain)
    ids = torch.randint(3, 97, (1, 16))
    with torch.inference_mode():
        assert torch.equal(packed(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_float32_is_left_alone():
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32)
    assert pack_linears_inplace(model, None) == 0
