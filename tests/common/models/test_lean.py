import copy

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from tests.trainer.toy import groups, tiny_config
from trinity.common.models.lean import make_lean_inplace
from trinity.trainer.backends.torch.policy import Policy
from trinity.trainer.backends.torch.weights import Weights
from trinity.trainer.batch import TrainBatch


def two_models(dtype, **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(**changes), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    model = model.to(dtype).train()
    lean = copy.deepcopy(model)
    make_lean_inplace(lean)
    return model, lean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lean_layers_give_the_same_outputs_and_gradients(dtype):
    model, lean = two_models(dtype)
    ids = torch.randint(3, 97, (2, 300))
    found, wanted = (m(input_ids=ids).logits for m in (lean, model))
    gap = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found, wanted, rtol=gap, atol=gap)
    weights = torch.randn(found.shape)
    for logits in (found, wanted):
        (logits.float() * weights).sum().backward()
    tolerance = 2e-5 if dtype == torch.float32 else 0.03
    gradients = {name: p.grad.float() for name, p in model.named_parameters()}
    assert gradients.keys() == {name for name, _ in lean.named_parameters()}
    for name, parameter in lean.named_parameters():
        gap = (parameter.grad.float() - gradients[name]).norm() / gradients[name].norm()
        assert gap < tolerance, name


def test_every_norm_and_mlp_of_a_llama_is_replaced():
    _, lean = two_models(torch.float32)
    assert make_lean_inplace(copy.deepcopy(lean)) == 0
    names = [type(module).__name__ for module in lean.modules()]
    assert names.count("LeanRMSNorm") == 5
    assert names.count("LeanGatedMLP") == 2


def test_what_computes_something_else_stays():
    norm = GemmaRMSNorm(32)  # scales by 1 + weight
    norm.variance_epsilon = norm.eps
    _, other = two_models(torch.float32, hidden_act="gelu")
    names = [type(module).__name__ for module in other.modules()]
    assert make_lean_inplace(torch.nn.Sequential(norm)) == 0
    assert "LeanGatedMLP" not in names


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("padding", [None, 5])  # a token of the batch; its embedding stays
def test_gradients_that_go_to_the_master_equal_those_that_come_through_autograd(is_tied, padding):
    batch = TrainBatch.from_experiences(groups())
    found = []
    for is_direct in (True, False):
        model, _ = two_models(torch.float32, tie_word_embeddings=is_tied, pad_token_id=padding)
        policy = Policy(model)
        weights = Weights(model, torch.bfloat16)
        if not is_direct:
            for parameter in model.parameters():
                del parameter._trinity_master
        outputs = policy.token_outputs(batch).values["logprob"]
        torch.autograd.backward(outputs, torch.linspace(-1, 1, len(outputs)))
        found.append({name: master.grad for name, master in weights.masters.items()})
    if padding is not None and not is_tied:
        assert not found[0]["model.embed_tokens.weight"][padding].any()
    for name, wanted in found[1].items():
        assert (found[0][name] - wanted).norm() / wanted.norm() < 0.01, name
