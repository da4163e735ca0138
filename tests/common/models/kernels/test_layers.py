"""The compiled kernels against float64 of PyTorch, and against the ones PyTorch stands in with."""

import pytest
import torch
from torch.nn.functional import silu

from trinity.common.models import kernels
from trinity.common.models.kernels import _native, _plain

DTYPES = [torch.float32, torch.bfloat16]
GAP = {torch.float32: 3e-6, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.skipif(
    not _native.are_fit(torch.zeros(1)), reason="no C++ compiler is installed"
)


def rows(*shape, dtype):
    return torch.randn(*shape).to(dtype)


def assert_near(found, wanted):
    gap = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    assert gap < GAP[found.dtype]


@pytest.fixture(autouse=True, params=[_native, _plain], ids=["native", "plain"])
def which(request, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "_kernels", lambda *_: request.param)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 16, 75])
def test_rms_norm(dtype, width):
    x, weight, grad = (rows(*s, dtype=dtype) for s in ((130, width), (width,), (130, width)))
    found, scales = kernels.rms_norm(x, weight, 1e-5)
    wide, wide_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    wanted = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * wide_weight
    assert_near(found, wanted)
    wanted.backward(grad.double())
    at_rows, at_weight = kernels.rms_norm_backward(grad, x, weight, scales)
    assert_near(at_rows, wide.grad)
    assert at_weight.dtype == torch.float32
    assert_near(at_weight, wide_weight.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 64, 1003])
def test_silu_mul(dtype, size):
    gate, up, grad = (3 * rows(size, dtype=dtype) for _ in range(3))
    wide_gate, wide_up = gate.double().requires_grad_(), up.double().requires_grad_()
    wanted = silu(wide_gate) * wide_up
    wanted.backward(grad.double())
    assert_near(kernels.silu_mul(gate, up), wanted)
    out, gate_grad = kernels.silu_mul_backward_inplace(grad, gate, up)
    assert_near(out, wanted)
    assert_near(gate_grad, wide_gate.grad)
    assert_near(grad, wide_up.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [6, 32, 80])
def test_rotation_and_its_gradient(dtype, size):
    x, grad = rows(9, 3, size, dtype=dtype), rows(9, 3, size, dtype=dtype)
    cosine, sine = (rows(9, size, dtype=dtype) for _ in range(2))
    wide = x.double().requires_grad_()
    half = torch.cat([-wide[..., size // 2 :], wide[..., : size // 2]], dim=-1)
    wanted = wide * cosine.double()[:, None] + half * sine.double()[:, None]
    wanted.backward(grad.double())
    assert_near(kernels.rotate_inplace(x.clone(), cosine, sine), wanted)
    assert_near(kernels.rotate_inplace(grad, cosine, sine, is_gradient=True), wide.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [33, 2048, 5001])
@pytest.mark.parametrize("wants_entropy", [True, False])
def test_token_statistics_and_their_gradient(dtype, vocabulary, wants_entropy):
    logits, divisor = 4 * rows(17, vocabulary, dtype=dtype), torch.rand(17) + 0.5
    target = torch.randint(0, vocabulary, (17,))
    wide = logits.double().requires_grad_()
    log_p = (wide / divisor.double()[:, None]).log_softmax(-1)
    wanted = log_p.gather(1, target[:, None])[:, 0]
    wanted_entropy = -(log_p.exp() * log_p).sum(-1)
    logprob, norm, entropy = kernels.token_statistics(logits, divisor, target, wants_entropy)
    assert_near(logprob, wanted)
    grad, grad_entropy = torch.randn(17), torch.randn(17) * wants_entropy
    (wanted * grad + wanted_entropy * grad_entropy).sum().backward()
    if wants_entropy:
        assert_near(entropy, wanted_entropy)
    given = (grad / divisor, grad_entropy / divisor)
    kernels.logit_gradient_inplace(logits, divisor, target, norm, entropy, *given)
    assert_near(logits, wide.grad)


def test_what_is_not_finite_shows():
    x = torch.tensor([[1.0, float("nan"), 2.0, 3.0]])
    for dtype in DTYPES:
        given = x.to(dtype)
        assert kernels.rms_norm(given, torch.ones(4, dtype=dtype), 1e-5)[0].isnan().all()
        assert kernels.silu_mul(given, given)[0, 1].isnan()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_number_of_threads_changes_nothing(num_threads):
    x, weight = rows(700, 48, dtype=torch.bfloat16), rows(48, dtype=torch.bfloat16)
    _, scales = kernels.rms_norm(x, weight, 1e-5)
    wanted = kernels.rms_norm_backward(x, x, weight, scales)
    own = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = kernels.rms_norm_backward(x, x, weight, scales)
    finally:
        torch.set_num_threads(own)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
