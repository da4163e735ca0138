"""Masters kept as halves: every float comes out as it went in, and steps are those of AdamW."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from tests.trainer.toy import tiny_config
from trinity.trainer.backends.torch.masters import SplitMasters, untouched_zeros
from trinity.trainer.backends.torch.optimizer import MasterOptimizer, OptimizerSettings
from trinity.trainer.backends.torch.weights import Weights

LOWER_HALVES = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]  # 0x8000: a tie


def floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Bit for bit, any NaN as any other."""
    bits = found.view(torch.int32) == wanted.view(torch.int32)
    return bool((bits | (found.isnan() & wanted.isnan())).all())


def check_kept(values: torch.Tensor, before: torch.Tensor) -> None:
    weight = nn.Parameter(before)
    masters = SplitMasters({"w": weight})
    assert same(masters["w"], before)
    masters.set("w", values)
    assert same(masters["w"], values)
    assert same(weight.detach().float(), values.to(torch.bfloat16).float())


half = st.integers(0, 0xFFFF) | st.sampled_from(LOWER_HALVES)
bits = st.builds(lambda upper, lower: upper << 16 | lower, half, half)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(bits, bits), min_size=1, max_size=50))
def test_any_float_comes_out_as_it_went_in(pairs):
    values, before = floats(torch.tensor(pairs)).unbind(dim=1)
    check_kept(values.contiguous(), before.contiguous())


def test_every_weight_with_the_remainders_at_the_edges():
    upper = torch.arange(1 << 16).repeat(len(LOWER_HALVES))
    lower = torch.tensor(LOWER_HALVES).repeat_interleave(1 << 16)
    values = floats(upper << 16 | lower)
    check_kept(values, values.flip(0))


@pytest.mark.parametrize("checkpoint", [torch.float32, torch.bfloat16])
def test_steps_have_the_bits_of_adamw_on_whole_masters(checkpoint):
    torch.manual_seed(0)
    config = tiny_config(vocab_size=8201, hidden_size=36, num_attention_heads=2)  # > a block
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(checkpoint).float()
    plain = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    rates = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
    adam = torch.optim.AdamW(plain.values(), fused=True, **rates)
    weights = Weights(model, torch.bfloat16)
    optimizer = MasterOptimizer(weights, OptimizerSettings(clip_grad=1.0, **rates))
    assert weights.split is not None
    for step in range(6):
        for name, master in plain.items():
            master.grad = torch.randn(master.shape) * 10.0 ** (step - 4)
            weights.split.gradients[name].add_(master.grad)
        scale = (1.0 / (weights.gradient_norm() + 1e-6)).clamp(max=1.0)
        if scale < 1:
            torch._foreach_mul_([master.grad for master in plain.values()], scale)
        adam.step()
        optimizer.step()
        for name, parameter in model.named_parameters():
            assert torch.equal(weights.masters[name], plain[name]), (step, name)
            assert torch.equal(parameter, plain[name].to(torch.bfloat16)), (step, name)
    saved = optimizer.state_dict()["state"]
    for entry, wanted in zip(saved.values(), adam.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(entry[key], value) for key, value in wanted.items())


def test_a_master_comes_with_its_gradient_and_is_a_copy():
    weight = nn.Parameter(torch.ones(3))
    masters = SplitMasters({"w": weight})
    masters.gradients["w"].fill_(2)
    masters["w"].fill_(5)
    assert masters["w"].tolist() == [1, 1, 1]
    assert masters["w"].grad.tolist() == [2, 2, 2]
    assert "v" not in masters


def test_zeros_take_memory_when_they_are_written():
    def resident_mb() -> float:
        [line] = re.findall(r"^Rss: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)
        return int(line) / 2**10

    before = resident_mb()
    first, second = untouched_zeros([torch.Size([64, 2**18]), torch.Size([3])], torch.float32)
    assert resident_mb() - before < 8
    assert not first.any()
    assert second.tolist() == [0, 0, 0]
    first.add_(1)
    assert resident_mb() - before > 56
