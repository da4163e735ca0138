"""Log-probabilities and entropies of tokens from hidden states, never holding logits of more than
a chunk of tokens.

Shape letters: M = tokens, C = tokens of a chunk, V = vocabulary, D = hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trinity.algorithm.advantage_fn.entropy_clip import expected_entropy_score
from trinity.trainer.backends.torch import head_kernels
from trinity.trainer.backends.torch.weights import gradient_of_master

#: Logits of a chunk, for the matrix products: 40 MB in bfloat16 ...
_CHUNK_ELEMENTS = 20_000_000
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
        raw_CV = hidden[chunk] @ weight.t()
        for part, own in _parts(chunk, len(weight)):
            logits, _ = _logits(raw_CV[own], divisor[part], spec)
            scores[part] = expected_entropy_score(logits)
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
            raw_CV = hidden[chunk] @ weight.t()
            if _has_kernels(hidden, spec):
                kernels = (raw_CV, divisor[chunk], target[chunk])
                found = head_kernels.token_statistics(*kernels, spec.wants_entropy)
                logprob[chunk], log_norm[chunk], entropy[chunk] = found
                continue
            for part, own in _parts(chunk, len(weight)):
                logits, _ = _logits(raw_CV[own], divisor[part], spec)
                picked = logits.gather(1, target[part, None]).squeeze(1)
                peak = logits.amax(dim=1)
                shifted = logits.sub_(peak[:, None])
                probs = shifted.exp()
                total = probs.sum(dim=1)
                log_norm[part] = total.log() + peak
                logprob[part] = picked - log_norm[part]
                if spec.wants_entropy:
                    mean = torch.bmm(probs[:, None], shifted[:, :, None]).flatten() / total
                    entropy[part] = total.log() - mean
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
        if spec.wants_entropy and not _has_kernels(hidden, spec) and not grad_entropy.any():
            spec = replace(spec, wants_entropy=False)  # it is only watched
        for chunk in _chunks(len(hidden), len(weight), _chunk_elements(hidden.device)):
            raw_CV = hidden[chunk] @ weight.t() if kept is None else kept
            is_done = _has_kernels(hidden, spec)
            if is_done:
                per_token = (divisor, target, log_norm, entropy, grad_logprob, grad_entropy)
                head_kernels.logit_gradient_inplace(raw_CV, *(t[chunk] for t in per_token))
            for part, own in () if is_done else _parts(chunk, len(weight)):
                logits, slope = _logits(raw_CV[own], divisor[part], spec, wants_slope=True)
                log_p = logits.sub_(log_norm[part, None])
                grad = _logit_gradient(
                    log_p, target[part], entropy[part], grad_logprob[part], grad_entropy[part], spec
                )
                raw_CV[own] = grad if slope is None else grad.mul_(slope)
            grad_hidden[chunk] = raw_CV @ weight
            if total is not None:
                _add_product_inplace(total, raw_CV, hidden[chunk])
            elif ctx.needs_input_grad[1]:
                found = raw_CV.t() @ hidden[chunk]
                grad_weight = found if grad_weight is None else grad_weight.float().add_(found)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def _add_product_inplace(total_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    """Add ``grad.T @ hidden``, on a CPU some rows at a time: the product is never there as a whole.

    On a GPU rows that begin at odd places would take kernels of a third of the speed.
    """
    if total_VD.is_cuda:
        total_VD.add_(grad_CV.t() @ hidden_CD)
        return
    step = max(1, 16 * _CACHE_ELEMENTS // hidden_CD.shape[1])
    for first in range(0, len(total_VD), step):
        now = slice(first, first + step)
        total_VD[now].add_(grad_CV[:, now].t() @ hidden_CD)


def _has_kernels(hidden: Tensor, spec: HeadSpec) -> bool:
    return hidden.is_cuda and spec.softcap is None


def _logits(
    raw: Tensor, divisor: Tensor, spec: HeadSpec, wants_slope: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Products as logits of the sampling distribution (a new float32 tensor), and their slope."""
    if spec.softcap is None:
        logits = raw.to(torch.float32, copy=True)
        return (logits if _is_one(divisor) else logits.div_(divisor[:, None])), None
    bend = (raw.float() / (spec.scale * spec.softcap)).tanh_()
    slope = 1 - bend.square() if wants_slope else None
    return bend.mul_((spec.softcap * spec.scale / divisor)[:, None]), slope


def _is_one(divisor: Tensor) -> bool:
    return divisor.device.type == "cpu" and bool((divisor == 1).all())


def _logit_gradient(
    log_p: Tensor,
    target: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    spec: HeadSpec,
) -> Tensor:
    """``g (1[target] - p) - e p (log p + H)``; changes ``log_p``."""
    if spec.wants_entropy:
        weight = (log_p + entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logprob[:, None])
        grad = log_p.exp_().mul_(weight).neg_()
    else:
        grad = log_p.exp_().mul_(-grad_logprob[:, None])
    return grad.scatter_add_(1, target[:, None], grad_logprob[:, None])


def _chunks(num_tokens: int, num_columns: int, max_elements: int) -> Iterator[slice]:
    """Slices of the tokens, as even as their number allows."""
    num_chunks = max(1, -(-num_tokens * num_columns // max_elements))
    size = max(1, -(-num_tokens // num_chunks))
    for first in range(0, num_tokens, size):
        yield slice(first, min(first + size, num_tokens))


def _parts(chunk: slice, num_columns: int) -> Iterator[tuple[slice, slice]]:
    """Small slices of a chunk: among all tokens, and within the chunk."""
    length = chunk.stop - chunk.start
    for own in _chunks(length, num_columns, _CACHE_ELEMENTS):
        yield slice(chunk.start + own.start, chunk.start + own.stop), own
