import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING

from tests.trainer.toy import groups
from trinity.trainer.backends.torch import head
from trinity.trainer.backends.torch.head import HeadSpec, token_logprobs
from trinity.trainer.backends.torch.policy import Policy
from trinity.trainer.batch import TrainBatch


def plain(hidden, weight, target, temperature, spec):
    logits = hidden @ weight.t() / spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    log_p = (logits / temperature[:, None]).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, target[:, None]).squeeze(1), entropy


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_expected_entropy_scores_equal_their_sum(monkeypatch, softcap):
    monkeypatch.setattr(head, "_CHUNK_ELEMENTS", 97 * 7)
    spec = HeadSpec(scale=2.0, softcap=softcap)
    hidden, weight, temperature = torch.randn(25, 16), torch.randn(97, 16), torch.rand(25) + 0.5
    target = torch.arange(97).repeat_interleave(25)
    rows = torch.arange(25).repeat(97)
    found = plain(hidden[rows], weight, target, temperature[rows], spec)
    log_p, entropy = (part.view(97, 25) for part in found)
    wanted = (log_p.exp() ** 2 * (entropy + log_p)).sum(0)
    found = head.expected_entropy_scores(hidden, weight, temperature, spec)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk", [10**9, 97 * 7])
@pytest.mark.parametrize(
    "spec",
    [
        HeadSpec(),
        HeadSpec(wants_entropy=True),
        HeadSpec(scale=2.0, softcap=3.0, wants_entropy=True),
        HeadSpec(softcap=1.5),
    ],
)
def test_values_and_gradients_equal_full_logits(monkeypatch, chunk, spec):
    monkeypatch.setattr(head, "_CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(head, "_CACHE_ELEMENTS", 97 * 3)
    torch.manual_seed(0)
    hidden = torch.randn(25, 16, requires_grad=True)
    weight = torch.randn(97, 16, requires_grad=True)
    target = torch.randint(0, 97, (25,))
    temperature = torch.rand(25) + 0.5
    g_logprob, g_entropy = torch.randn(25), torch.randn(25)
    if not spec.wants_entropy:
        g_entropy = torch.zeros(25)
    found = token_logprobs(hidden, weight, target, temperature, spec)
    found_grad = torch.autograd.grad(found, [hidden, weight], [g_logprob, g_entropy])
    wanted = plain(hidden, weight, target, temperature, spec)
    wanted_grad = torch.autograd.grad(wanted, [hidden, weight], [g_logprob, g_entropy])
    torch.testing.assert_close(found[0], wanted[0], atol=2e-6, rtol=1e-5)
    if spec.wants_entropy:
        torch.testing.assert_close(found[1], wanted[1], atol=2e-6, rtol=1e-5)
    for a, b in zip(found_grad, wanted_grad, strict=True):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("granite", {"logits_scaling": 5.0}),
        ("hyperclovax", {"logits_scaling": 5.0}),
        ("cohere", {"logit_scale": 3.0}),
        ("gemma2", {"final_logit_softcapping": 0.3, "head_dim": 8}),
    ],
)
def test_logits_are_scaled_and_bound_as_the_models_own(kind, changes):
    """Granite divides by ``logits_scaling``, HyperCLOVA X multiplies by it."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 97}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    config = CONFIG_MAPPING[kind](**shape, **heads, initializer_range=0.5, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    [row, *_] = groups(1, 1)
    batch = TrainBatch.from_experiences([row])
    with torch.no_grad():
        logits = model(row.tokens[None]).logits[0, row.prompt_length - 1 : -1]
        found = Policy(model).token_outputs(batch).by_row(batch)["logprob"][0]
    target = row.tokens[row.prompt_length :, None]
    wanted = logits.log_softmax(-1).gather(1, target).squeeze(1)
    torch.testing.assert_close(found[: len(wanted)], wanted, atol=2e-4, rtol=1e-4)
