"""Log-probabilities and entropies of tokens from hidden states, never holding logits of more than
a chunk of tokens.

Shape letters: M = tokens, C = tokens of a chunk, V = vocabulary, D = hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Elements of a chunk of logits: 32 MB in float32.
_CHUNK_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class HeadSpec:
    """How logits follow from hidden states besides the weight: ``cap * tanh(h W / (s cap))``.

    Args:
        scale: The model's own divisor of the logits (Granite, Cohere).
        softcap: Bound of the logits (Gemma); None for none.
        wants_entropy: Compute entropies too.
    """

    scale: float = 1.0
    softcap: float | None = None
    wants_entropy: bool = False


def token_logprobs(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: Tensor, spec: HeadSpec
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy of each distribution, in float32.

    Logits are ``hidden @ weight.T`` in the dtype of the weight, then float32, divided by the
    temperature: the distribution that was sampled from. The backward pass computes them again.

    Args:
        hidden: [M, D].
        weight: [V, D].
        target: [M] int64.
        temperature: [M] float32, above 0.

    Returns:
        logprob [M] and entropy [M] (zeros unless ``spec.wants_entropy``).
    """
    return _TokenLogprobs.apply(hidden, weight, target, temperature, spec)


def _logits(hidden: Tensor, weight: Tensor, temperature: Tensor, spec: HeadSpec) -> Tensor:
    logits_CV = (hidden @ weight.t()).float()
    if spec.scale != 1.0:
        logits_CV.div_(spec.scale)
    if spec.softcap is not None:
        logits_CV.div_(spec.softcap).tanh_().mul_(spec.softcap)
    return logits_CV.div_(temperature[:, None])


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: Tensor,
        spec: HeadSpec,
    ) -> tuple[Tensor, Tensor]:
        logprob = hidden.new_empty(len(hidden), dtype=torch.float32)
        log_norm, entropy = torch.empty_like(logprob), torch.zeros_like(logprob)
        for part in _chunks(hidden, weight):
            logits_CV = _logits(hidden[part], weight, temperature[part], spec)
            log_norm[part] = logits_CV.logsumexp(dim=-1)
            picked = logits_CV.gather(1, target[part, None]).squeeze(1)
            logprob[part] = picked - log_norm[part]
            if spec.wants_entropy:
                probs_CV = logits_CV.sub(log_norm[part, None]).exp_()
                entropy[part] = log_norm[part] - probs_CV.mul_(logits_CV).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, target, temperature, log_norm, entropy)
        ctx.spec = spec
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, target, temperature, log_norm, entropy = ctx.saved_tensors
        spec: HeadSpec = ctx.spec
        grad_hidden = torch.empty_like(hidden)
        wants_weight = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for part in _chunks(hidden, weight):
            logits_CV = _logits(hidden[part], weight, temperature[part], spec)
            grad_CV = logits_CV.sub(log_norm[part, None])
            if spec.wants_entropy:
                surprise_CV = grad_CV + entropy[part, None]
                factor_CV = surprise_CV.mul_(grad_entropy[part, None]).add_(
                    grad_logprob[part, None]
                )
                grad_CV.exp_().mul_(factor_CV).neg_()
            else:
                grad_CV.exp_().mul_(-grad_logprob[part, None])
            grad_CV.scatter_add_(1, target[part, None], grad_logprob[part, None])
            grad_CV.div_(temperature[part, None] * spec.scale)
            if spec.softcap is not None:
                capped_CV = logits_CV.mul_(temperature[part, None]).div_(spec.softcap)
                grad_CV.mul_(1 - capped_CV.square_())
            grad_CV = grad_CV.to(weight.dtype)
            grad_hidden[part] = grad_CV @ weight
            if grad_weight is not None:
                grad_weight += grad_CV.t() @ hidden[part]
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Slices of the tokens, as even as their number allows."""
    num_chunks = -(-len(hidden) * len(weight) // _CHUNK_ELEMENTS)
    size = max(1, -(-len(hidden) // max(num_chunks, 1)))
    for start in range(0, len(hidden), size):
        yield slice(start, start + size)
