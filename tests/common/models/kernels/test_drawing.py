"""Tokens drawn by the compiled kernel, against the running sum of probabilities in float64."""

import pytest
import torch

from trinity.common.models import kernels
from trinity.common.models.kernels import drawing

pytestmark = pytest.mark.skipif(
    not drawing.fits(torch.zeros(1, 1)), reason="no C++ compiler is installed"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 5, 16, 1000, 1024, 5003])
def test_the_token_is_where_the_running_sum_reaches_the_number(dtype, width):
    torch.manual_seed(width)
    logits = torch.randn(200, width).mul_(4).to(dtype)
    divisor = torch.rand(200) + 0.5
    uniform = torch.rand(200, dtype=torch.float64)
    uniform[:2] = torch.tensor([2.0**-54, 1 - 2.0**-54])
    token, logprob, log_norm = drawing.draw_tokens(logits, divisor, uniform)
    running = (logits.double() / divisor[:, None]).softmax(1).cumsum(1)
    after = running.gather(1, token[:, None])[:, 0]
    before = torch.where(token > 0, running.gather(1, (token - 1).clamp(min=0)[:, None])[:, 0], 0)
    assert (before - 1e-5 < uniform).all() and (uniform < after + 1e-5).all()
    wanted = kernels.token_statistics(logits, divisor, token, False)
    assert torch.equal(logprob, wanted[0]) and torch.equal(log_norm, wanted[1])


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((3, 2100), -1000.0)
    logits[:, 1030] = 0
    logits[:, 2000] = -100.0  # nothing remains of it in float32
    uniform = torch.tensor([2.0**-54, 0.5, 1 - 2.0**-54], dtype=torch.float64)
    token, logprob, _ = drawing.draw_tokens(logits, torch.ones(3), uniform)
    assert token.tolist() == [1030] * 3 and logprob.tolist() == [0.0] * 3


def test_a_row_is_drawn_alike_whatever_rows_are_beside_it():
    torch.manual_seed(0)
    logits, uniform = torch.randn(40, 3000), torch.rand(40, dtype=torch.float64)
    together = drawing.draw_tokens(logits, torch.ones(40), uniform)
    for row in (0, 17, 39):
        one = slice(row, row + 1)
        alone = drawing.draw_tokens(logits[one], torch.ones(1), uniform[one])
        assert all(torch.equal(a, b[one]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_norm_says_of_logits_that_are_not_finite(value):
    logits = torch.zeros(1, 50)
    logits[0, 20] = value
    _, _, log_norm = drawing.draw_tokens(logits, torch.ones(1), torch.tensor([0.5]).double())
    assert not log_norm.isfinite().any()
