"""Log-probabilities in the place of veRL's are those of a whole log-softmax."""

import pytest
import torch

from trinity.trainer.backends.verl import logprobs
from trinity.trainer.backends.verl.compat import load_engines


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
@pytest.mark.parametrize("elements", [1, 2 * 11, 1000])
def test_values_and_gradients(monkeypatch, shape, elements):
    monkeypatch.setattr(logprobs, "_ELEMENTS", elements)
    torch.manual_seed(0)
    logits = torch.randn(*shape, 11, requires_grad=True)
    labels = torch.randint(0, 11, shape)
    found = logprobs.chosen_logprobs(logits, labels)
    wanted = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn(shape)
    gradients = [torch.autograd.grad((out * weights).sum(), logits)[0] for out in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_verl_uses_them():
    functional = pytest.importorskip("verl.utils.torch_functional")
    load_engines("cpu")
    logits, labels = torch.randn(4, 7), torch.tensor([0, 6, 3, 3])
    wanted = logits.log_softmax(-1)[torch.arange(4), labels]
    torch.testing.assert_close(functional.logprobs_from_logits(logits, labels), wanted)
    assert functional.logprobs_from_logits_v2 is logprobs.chosen_logprobs
