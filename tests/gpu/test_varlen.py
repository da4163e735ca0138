"""Keys and values that segments share are copied bit by bit, and their gradients summed up."""

import pytest
import torch

from trinity.trainer.backends.torch.varlen import _gathered, _summed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("groups", "head_size"), [(2, 128), (3, 24), (1, 8)])
def test_rows_are_copied_and_their_gradients_summed_up(dtype, groups, head_size):
    torch.manual_seed(0)
    uses = torch.randint(0, 30, (101,), device="cuda")
    index = torch.arange(len(uses), device="cuda").repeat_interleave(uses)
    index = index[torch.randperm(len(index), device="cuda")]
    key, value = (torch.randn(101, groups, head_size, device="cuda").to(dtype) for _ in range(2))
    found = _gathered(key, value, index)
    assert torch.equal(found[0], key[index])
    assert torch.equal(found[1], value[index])
    slots, offsets = index.argsort(stable=True), uses.cumsum(0) - uses
    for summed, given in zip(_summed(*found, slots, offsets), found, strict=True):
        wanted = torch.zeros_like(key, dtype=torch.float32).index_add_(0, index, given.float())
        torch.testing.assert_close(summed, wanted.to(dtype), rtol=1e-2, atol=1e-2)
