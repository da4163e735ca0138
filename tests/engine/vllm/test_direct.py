"""Loading by plain copies, as seen on a small model with stacked and cut parameters."""

import torch
from torch import nn

from trinity.engine.vllm.direct import DirectLoader


class Stacked(nn.Module):
    """Keeps query and key in one parameter, and of ``wide`` the left half, as vLLM does."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.both = nn.Parameter(torch.zeros(6, 8, dtype=dtype), requires_grad=False)
        self.left = nn.Parameter(torch.zeros(5, 3, dtype=dtype), requires_grad=False)
        self.calls = 0

    def load_weights(self, weights):
        self.calls += 1
        for name, weight in weights:
            if name == "query":
                self.both.data[:4].copy_(weight)
            elif name == "key":
                self.both.data[4:].copy_(weight)
            elif name == "wide":
                self.left.data.copy_(weight[:, 3:])


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"query": (4, 8), "key": (2, 8), "wide": (5, 6), "unused": (3,)}
    buffer = torch.randn(200, generator=generator).to(torch.bfloat16)
    found, start = [], 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        found.append((name, buffer[start : start + size].view(shape)))
        start += size
    return found


def update(loader, named):
    loader.load(named[:2])
    loader.load(named[2:])
    loader.finish()


def assert_holds(model, named):
    given = dict(named)
    assert torch.equal(model.both[:4].float(), given["query"].float())
    assert torch.equal(model.both[4:].float(), given["key"].float())
    assert torch.equal(model.left.float(), given["wide"][:, 3:].float())


def test_the_second_update_makes_the_copies_of_the_first():
    model = Stacked()
    loader = DirectLoader(model)
    for seed in range(3):
        update(loader, weights(seed))
        assert_holds(model, weights(seed))
        assert model.calls == 2


def test_where_a_copy_converts_the_model_loads_each_time():
    model = Stacked(torch.float32)
    loader = DirectLoader(model)
    for seed in range(2):
        update(loader, weights(seed))
        assert_holds(model, weights(seed))
    assert model.calls == 4


def test_half_filled_parameters_are_loaded_each_time():
    model = Stacked()
    model.padding = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16), requires_grad=False)
    loader = DirectLoader(model)
    for seed in range(2):
        update(loader, weights(seed))
    assert model.calls == 4
