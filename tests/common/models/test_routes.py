import pytest
import torch

from tests.common.models import moe
from tests.trainer import toy
from trinity.common.models.routes import UNKNOWN, Routers, filled, joined

IDS = torch.arange(3, 40)[None]


@pytest.mark.parametrize("family", list(moe.FAMILIES))
def test_routes_are_noted_and_prescribed(family):
    model = moe.made(moe.FAMILIES[family]())
    with torch.no_grad():
        plain = model(IDS).logits
        routers = Routers(model)
        with routers.noting() as noted:
            model(IDS)
            own = noted()
        assert own.shape == (IDS.shape[1], routers.num_layers, moe.PER_TOKEN)
        routers.follow(own)
        assert torch.equal(model(IDS).logits, plain)

        other = moe.other_routes(*own.shape[:2])
        other[own == UNKNOWN] = UNKNOWN  # layers without experts
        routers.follow(other)
        with routers.noting() as noted:
            assert float((model(IDS).logits - plain).abs().max()) > 0.1
            assert torch.equal(noted(), other)

        other[1:] = UNKNOWN
        routers.follow(other)
        with routers.noting() as noted:
            model(IDS)
            taken = noted()
        assert torch.equal(taken[0], other[0])
        first = int((own[0] != UNKNOWN).all(-1).nonzero()[0])
        assert torch.equal(taken[1:, first], own[1:, first])  # deeper ones saw another first token

        routers.follow(None)
        assert torch.equal(model(IDS).logits, plain)


def test_routers_tell_what_transformers_does():
    model = moe.made(moe.qwen())
    with torch.no_grad():
        logits = model(IDS, output_router_logits=True).router_logits
        with Routers(model).noting() as noted:
            model(IDS)
            found = noted().long()
    wanted = torch.stack([layer.topk(moe.PER_TOKEN).indices for layer in logits], 1)
    assert torch.equal(found, wanted)


def test_how_much_an_expert_counts_is_the_routers_own():
    """One layer by hand: softmax over all experts, of the prescribed ones scaled to add up to 1."""
    block = moe.made(moe.qwen()).model.layers[0].mlp
    hidden = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
    routes = moe.other_routes(6, 3)
    whole = moe.made(moe.qwen())
    routers = Routers(whole)
    routers.follow(routes)
    found = whole.model.layers[0].mlp(hidden)
    found = (found[0] if isinstance(found, tuple) else found)[0]

    weights, experts = block.gate.weight, block.experts
    probability = (hidden[0] @ weights.T).softmax(-1)
    for n in range(6):
        chosen = routes[n, 0].long()
        share = probability[n, chosen] / probability[n, chosen].sum()
        wanted = torch.zeros(32)
        for k, expert in enumerate(chosen.tolist()):
            gate, up = (experts.gate_up_proj[expert] @ hidden[0, n]).chunk(2)
            out = experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
            wanted += share[k] * out
        torch.testing.assert_close(found[n], wanted, atol=1e-5, rtol=1e-5)


def test_backward_passes_follow_and_reach_the_router():
    model = moe.made(moe.qwen()).train()
    routers = Routers(model)
    routes = moe.other_routes(IDS.shape[1], 3)
    grads = {}
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        routers.follow(routes)
        model(IDS, labels=IDS).loss.backward()
        grads[checkpoints] = {n: p.grad.clone() for n, p in model.named_parameters()}
    name = "model.layers.0.mlp.gate.weight"
    assert float(grads[False][name].abs().max()) > 0
    for name, grad in grads[True].items():
        torch.testing.assert_close(grad, grads[False][name])


def test_a_dense_model_has_none():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(toy.tiny_config())
    with pytest.raises(ValueError, match=r"'llama' has no experts .*enable_router_replay"):
        Routers(model)


def test_a_router_that_chooses_otherwise_is_told(monkeypatch):
    config = moe.qwen()
    gate = type(moe.made(config).model.layers[0].mlp.gate)

    def by_sorting(self, hidden):
        scores = hidden.reshape(-1, config.hidden_size) @ self.weight.T
        chosen = scores.argsort(-1, descending=True)[:, : moe.PER_TOKEN]
        return scores, scores.gather(-1, chosen).softmax(-1), chosen

    monkeypatch.setattr(gate, "forward", by_sorting)
    model = moe.made(config)
    routers = Routers(model)
    model(IDS)
    told = "router of layer 0 does not choose experts by one topk"
    with pytest.raises(RuntimeError, match=told), routers.noting():
        model(IDS)
    routers.follow(moe.other_routes(IDS.shape[1], 3))
    with pytest.raises(RuntimeError, match=told):
        model(IDS)


def test_routes_of_sequences_that_go_on():
    earlier = filled(moe.other_routes(4, 2), 5)
    assert torch.equal(earlier[4], torch.full((2, 2), UNKNOWN))
    whole = filled(moe.other_routes(8, 2, seed=1), 9)
    found = joined(earlier, whole)
    assert torch.equal(found[:4], earlier[:4])
    assert torch.equal(found[4:], whole[4:])
    assert joined(None, whole) is whole
    assert joined(earlier, None) is None
