"""Drawing by the compiled kernel and by PyTorch alone."""

import numpy as np
import pytest
import torch

from trinity.engine.torch.sampler import DrawParams, _draw, _padded, draw, token_logprobs


def params(count, **changes):
    columns = {"temperature": 1.0, "top_p": 1.0, "top_k": 0.0, "min_p": 0.0, **changes}
    uniform = np.random.default_rng(0).random(count)
    whole = {name: np.broadcast_to(value, count).astype(float) for name, value in columns.items()}
    return DrawParams(**whole, uniform=uniform, forbidden={1: [3, 4]})


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": [0.0, 0.7, 1.3, 0.0] * 10}, {"top_p": 0.8}, {"top_k": [5, 0] * 20}],
)
def test_both_ways_draw_the_same_tokens(changes):
    torch.manual_seed(0)
    logits = torch.randn(40, 1000).mul_(3).bfloat16()
    given = params(40, **changes)
    tokens, logprobs = draw(logits, given)
    wanted_tokens, wanted_logprobs = _draw(_padded(logits), given)
    assert tokens.tolist() == wanted_tokens.tolist() and tokens[1] not in (3, 4)
    np.testing.assert_allclose(logprobs, wanted_logprobs, atol=1e-5)
    for row in range(40):
        temperature = float(given.temperature[row])
        one = logits[row : row + 1]
        scored = token_logprobs(one, torch.tensor([tokens[row]]), temperature)
        assert scored[0] == logprobs[row]


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(FloatingPointError, match="damaged"):
        draw(torch.full((2, 50), float("nan")), params(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_banned_token_far_more_likely_than_all_others_leaves_the_draw_to_these(dtype):
    logits = torch.zeros(2, 512, dtype=dtype)
    logits[:, 3], logits[:, 9] = 12.0, 6.0
    tokens, logprobs = draw(logits, params(2, temperature=0.01))
    assert tokens.tolist() == [3, 9]  # at this temperature the others have a weight of 0
    assert logprobs.tolist() == pytest.approx([0.0, -600.0])
