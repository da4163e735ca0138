import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.trainer.toy import VOCAB, groups, multi_turn
from trinity.common.models.adapters import AdapterSettings, add_adapter_inplace
from trinity.common.models.kernels import products
from trinity.common.models.lean import make_lean_inplace
from trinity.trainer.backends.torch.layers import join_layers_inplace
from trinity.trainer.backends.torch.policy import Policy
from trinity.trainer.backends.torch.weights import Weights
from trinity.trainer.batch import TrainBatch

GIVEN = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "Llama": LlamaConfig(**GIVEN),
    "Llama with biases": LlamaConfig(**GIVEN, attention_bias=True),
    "Mistral with a window": MistralConfig(**GIVEN, sliding_window=9),
    "Qwen2": Qwen2Config(**{n: v for n, v in GIVEN.items() if n != "head_dim"}),
    "Qwen3": Qwen3Config(**GIVEN),
}
needs_products = pytest.mark.skipif(
    not products.are_fit(torch.zeros(2, 2, dtype=torch.bfloat16)),
    reason="this processor has no products for the kernel, or there is no compiler",
)


def lean_model(config, is_lean=True):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).train()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        elif "bias" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    if is_lean:
        make_lean_inplace(model)
    return model


def gradients(model, batch, dtype=torch.bfloat16):
    """Log-probabilities, gradients at the masters, and layers that were one step of autograd."""
    policy = Policy(model)
    weights = Weights(model, dtype)
    outputs = policy.token_outputs(batch).values["logprob"]
    steps = num_steps(outputs.grad_fn, "_LayerBackward")
    torch.autograd.backward(outputs, torch.linspace(-1, 1, len(outputs)))
    return outputs.detach(), {name: master.grad for name, master in weights.masters.items()}, steps


def num_steps(node, name):
    """Nodes of that name that lie behind one of autograd's."""
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return sum(node.name() == name for node in seen)


@needs_products
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows", [groups, multi_turn])
def test_bits_are_those_of_the_modules(name, rows):
    batch = TrainBatch.from_experiences(rows())
    model, joined = lean_model(CONFIGS[name]), lean_model(CONFIGS[name])
    assert join_layers_inplace(joined) == 2
    outputs, found, steps = gradients(joined, batch)
    wanted_outputs, wanted, steps_of_modules = gradients(model, batch)
    assert (steps, steps_of_modules) == (2, 0)
    assert torch.equal(outputs, wanted_outputs)
    for key, grad in wanted.items():
        if "norm" in key or "bias" in key:  # the modules round what they add up
            assert (found[key] - grad).norm() / grad.norm() < 0.005, key
        else:
            assert torch.equal(found[key], grad), key


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_of_each_architecture_equal_rows_one_by_one(name):
    rows = groups()
    plain = lean_model(CONFIGS[name], is_lean=False)
    outputs = []
    for row in rows:
        logits = plain(input_ids=row.tokens[None].long()).logits[0]
        targets = row.tokens[row.prompt_length :].long()
        log_p = logits[row.prompt_length - 1 : -1].log_softmax(-1)
        outputs.append(log_p.gather(1, targets[:, None])[:, 0])
    wanted = torch.cat(outputs)
    wanted.backward(torch.linspace(-1, 1, len(wanted)))
    model = lean_model(CONFIGS[name])
    join_layers_inplace(model)
    found, at_weights, _ = gradients(model, TrainBatch.from_experiences(rows), torch.float32)
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-5)
    for key, parameter in plain.named_parameters():
        assert (at_weights[key] - parameter.grad).norm() / parameter.grad.norm() < 1e-5, key


@needs_products
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_float32(name):
    batch = TrainBatch.from_experiences(groups())
    joined, plain = lean_model(CONFIGS[name]), lean_model(CONFIGS[name])
    for model in (joined, plain):
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    join_layers_inplace(joined)
    _, found, _ = gradients(joined, batch)
    _, wanted, _ = gradients(plain, batch, torch.float32)
    for key, grad in wanted.items():
        assert (found[key] - grad).norm() / grad.norm() < 0.1, key  # bfloat16


@needs_products
def test_checkpointing_computes_the_layer_again_and_changes_nothing():
    batch = TrainBatch.from_experiences(groups())
    found = []
    for checkpoints in (False, True):
        model = lean_model(CONFIGS["Qwen3"])
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        join_layers_inplace(model)
        found.append(gradients(model, batch))
    assert [steps for _, _, steps in found] == [2, 2]
    assert torch.equal(found[0][0], found[1][0])
    for key, grad in found[0][1].items():
        assert torch.equal(grad, found[1][1][key]), key


@needs_products
def test_without_gradients_the_bits_are_the_same():
    batch = TrainBatch.from_experiences(groups())
    model = lean_model(CONFIGS["Llama"]).to(torch.bfloat16)
    wanted = Policy(model).token_outputs(batch).values["logprob"].detach()
    join_layers_inplace(model)
    with torch.no_grad():
        found = Policy(model).token_outputs(batch).values["logprob"]
    assert torch.equal(found, wanted)


@needs_products
def test_frozen_weights_get_no_gradient():
    batch = TrainBatch.from_experiences(groups())
    found = []
    for frozen in ("none", "mlp"):
        model = lean_model(CONFIGS["Qwen2"])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        join_layers_inplace(model)
        found.append(gradients(model, batch)[1])
    assert found[1].keys() == {name for name in found[0] if "mlp" not in name}
    for key, grad in found[1].items():
        assert torch.equal(grad, found[0][key]), key


@needs_products
def test_layers_learn_though_the_embedding_does_not():
    batch = TrainBatch.from_experiences(groups())
    found = []
    for joins in (False, True):
        model = lean_model(CONFIGS["Llama"])
        model.get_input_embeddings().weight.requires_grad_(False)
        if joins:
            join_layers_inplace(model)
        found.append(gradients(model, batch))
    assert found[1][2] == 1  # of two: autograd would not come back to the first
    for key, grad in found[0][1].items():
        assert (found[1][1][key] - grad).norm() / grad.norm() < 0.005, key


@pytest.mark.parametrize("change", ["float32", "adapter", "no masters"])
def test_what_the_kernel_does_not_compute_is_left_to_the_modules(change):
    batch = TrainBatch.from_experiences(groups())
    model = AutoModelForCausalLM.from_config(CONFIGS["Llama"], dtype=torch.float32).train()
    if change == "adapter":
        add_adapter_inplace(model, AdapterSettings(rank=2))
    make_lean_inplace(model)
    assert join_layers_inplace(model) == (0 if change == "adapter" else 2)
    if change == "no masters":
        outputs = Policy(model.bfloat16()).token_outputs(batch).values["logprob"]
        steps = num_steps(outputs.grad_fn, "_LayerBackward")
        outputs.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    else:
        dtype = torch.float32 if change == "float32" else torch.bfloat16
        _, _, steps = gradients(model, batch, dtype)
    assert steps == 0


def test_layers_of_others_are_left_alone():
    class LlamaDecoderLayer(torch.nn.Module):
        pass

    assert join_layers_inplace(torch.nn.Sequential(LlamaDecoderLayer())) == 0
