"""Log-probabilities and entropies of tokens from hidden states, never holding logits of more than
a chunk of tokens.

Shape letters: M = tokens, C = tokens of a chunk, V = vocabulary, D = hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trinity.algorithm.advantage_fn.entropy_clip import expected_entropy_score
from trinity.common.models import kernels
from trinity.common.models.gradients import gradient_of_master
from trinity.trainer.backends.torch import head_kernels

#: Logits of a chunk, for the matrix products: 52 MB in bfloat16 ...
_CHUNK_ELEMENTS = 26_000_000
#: ... of which so many are worked on at a time elementwise, in float32, inside the cache.
_CACHE_ELEMENTS = 1 << 19
#: Logits of a chunk on a GPU: 2 GiB in bfloat16, worked on in place.
_GPU_CHUNK_ELEMENTS = 1 << 30


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
    temperature: the distribution that was sampled from. Tokens of one chunk (`max_chunk`) keep
    their logits for the backward pass; with more tokens it computes them again, chunk by chunk.

    Args:
        hidden: [M, D].
        weight: [V, D].
        target: [M] int64.
        temperature: [M] float32, above 0.

    Returns:
        logprob [M] and entropy [M] (zeros unless ``spec.wants_entropy``).
    """
    return _TokenLogprobs.apply(hidden, weight, target, temperature, spec)


@torch.no_grad()
def expected_entropy_scores(
    hidden: Tensor, weight: Tensor, temperature: Tensor, spec: HeadSpec
) -> Tensor:
    """[M] ``sum_i p_i^2 (H + log p_i)`` of each distribution: what CLIP_V calls ``necs``.

    Arguments as of `token_logprobs`; without gradient.
    """
    scores = hidden.new_empty(len(hidden), dtype=torch.float32)
    divisor = temperature * spec.scale
    for chunk in _chunks(len(hidden), len(weight), _chunk_elements(hidden.device)):
        raw_CV = kernels.linear(hidden[chunk], weight)
        for now in _parts(raw_CV):
            raw = raw_CV[now]
            logits = raw.float() if spec.softcap is None else _bent(raw, spec)
            found = expected_entropy_score(logits / divisor[chunk][now, None])
            scores[chunk][now] = found
    return scores


def max_chunk(vocabulary: int, device: torch.device) -> int:
    """Tokens whose logits may be held at a time."""
    return max(1, _chunk_elements(device) // vocabulary)


def _chunk_elements(device: torch.device) -> int:
    return _GPU_CHUNK_ELEMENTS if device.type == "cuda" else _CHUNK_ELEMENTS


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # autograd's context
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: Tensor,
        spec: HeadSpec,
    ) -> tuple[Tensor, Tensor]:
        logprob = hidden.new_empty(len(hidden), dtype=torch.float32)
        log_norm, entropy = torch.empty_like(logprob), torch.zeros_like(logprob)
        divisor = temperature * spec.scale
        for chunk in _chunks(len(hidden), len(weight), _chunk_elements(hidden.device)):
            raw_CV = kernels.linear(hidden[chunk], weight)
            found = _statistics(raw_CV, divisor[chunk], target[chunk], spec)
            logprob[chunk], log_norm[chunk], entropy[chunk] = found
        kept = raw_CV if len(raw_CV) == len(hidden) else None
        ctx.save_for_backward(hidden, weight, target, divisor, log_norm, entropy, kept)
        ctx.spec = spec
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, target, divisor, log_norm, entropy, kept = ctx.saved_tensors
        spec: HeadSpec = ctx.spec
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        total = gradient_of_master(weight) if ctx.needs_input_grad[1] else None
        grad_logprob, grad_entropy = grad_logprob / divisor, grad_entropy / divisor
        per_token = (divisor, target, log_norm, entropy, grad_logprob, grad_entropy)
        for chunk in _chunks(len(hidden), len(weight), _chunk_elements(hidden.device)):
            raw_CV = kernels.linear(hidden[chunk], weight) if kept is None else kept
            _gradient_inplace(raw_CV, [t[chunk] for t in per_token], spec)
            grad_hidden[chunk] = kernels.sum_of_products((raw_CV, weight))
            if total is not None:
                kernels.add_transposed_product(total, raw_CV, hidden[chunk])
            elif ctx.needs_input_grad[1]:
                found = raw_CV.t() @ hidden[chunk]
                grad_weight = found if grad_weight is None else grad_weight.float().add_(found)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def _kernels(logits: Tensor) -> ModuleType:
    return head_kernels if logits.is_cuda else kernels


def _statistics(
    raw_CV: Tensor, divisor: Tensor, target: Tensor, spec: HeadSpec
) -> tuple[Tensor, ...]:
    """Log-probability of the target, log-norm and entropy of each row of products, [C]."""
    find = _kernels(raw_CV).token_statistics
    if spec.softcap is None:
        found: tuple[Tensor, ...] = find(raw_CV, divisor, target, spec.wants_entropy)
        return found
    parts = [
        find(_bent(raw_CV[now], spec), divisor[now], target[now], spec.wants_entropy)
        for now in _parts(raw_CV)
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _gradient_inplace(raw_CV: Tensor, per_token: Sequence[Tensor], spec: HeadSpec) -> None:
    """Replace products by the gradient at them."""
    change = _kernels(raw_CV).logit_gradient_inplace
    if spec.softcap is None:
        change(raw_CV, *per_token)
        return
    for now in _parts(raw_CV):
        bent = _bent(raw_CV[now], spec)
        slope = 1 - (bent / (spec.softcap * spec.scale)).square()
        change(bent, *(t[now] for t in per_token))
        raw_CV[now] = bent.mul_(slope)


def _bent(raw: Tensor, spec: HeadSpec) -> Tensor:
    """Products under the model's soft cap, times its scale, in float32."""
    assert spec.softcap is not None
    bound = spec.softcap * spec.scale
    return (raw.float() / bound).tanh_().mul_(bound)


def _chunks(num_tokens: int, num_columns: int, max_elements: int) -> Iterator[slice]:
    """Slices of the tokens, as even as their number allows."""
    num_chunks = max(1, -(-num_tokens * num_columns // max_elements))
    size = max(1, -(-num_tokens // num_chunks))
    for first in range(0, num_tokens, size):
        yield slice(first, min(first + size, num_tokens))


def _parts(rows: Tensor) -> Iterator[slice]:
    """Rows that fit into the cache together."""
    return _chunks(rows.shape[0], rows.shape[1], _CACHE_ELEMENTS)
