"""Triton kernels of `trinity.trainer.backends.torch.head_kernels`: a program works on one token."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def statistics(
    raw_ptr,
    divisor_ptr,
    target_ptr,
    logprob_ptr,
    log_norm_ptr,
    entropy_ptr,
    vocabulary,
    wants_entropy: tl.constexpr,
    block: tl.constexpr,
):
    """Running maximum, sum of exponentials and their mean logit, in one pass."""
    token = tl.program_id(0).to(tl.int64)
    row_ptr = raw_ptr + token * vocabulary
    divisor = tl.load(divisor_ptr + token)
    peak = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, vocabulary, block):
        column = start + tl.arange(0, block)
        inside = column < vocabulary
        logit = tl.load(row_ptr + column, mask=inside, other=-float("inf")).to(tl.float32) / divisor
        higher = tl.maximum(peak, tl.max(logit, axis=0))
        shrink = tl.exp(peak - higher)
        share = tl.exp(logit - higher)
        total = total * shrink + tl.sum(share, axis=0)
        if wants_entropy:
            weighted = weighted * shrink + tl.sum(tl.where(inside, share * logit, 0.0), axis=0)
        peak = higher
    log_norm = peak + tl.log(total)
    target = tl.load(target_ptr + token)
    picked = tl.load(row_ptr + target).to(tl.float32) / divisor
    tl.store(logprob_ptr + token, picked - log_norm)
    tl.store(log_norm_ptr + token, log_norm)
    if wants_entropy:
        tl.store(entropy_ptr + token, log_norm - weighted / total)


@triton.jit
def gradient(
    raw_ptr,
    divisor_ptr,
    target_ptr,
    log_norm_ptr,
    entropy_ptr,
    grad_logprob_ptr,
    grad_entropy_ptr,
    vocabulary,
    block: tl.constexpr,
):
    """The gradient at each logit, written over the product it came from."""
    token = tl.program_id(0).to(tl.int64)
    row_ptr = raw_ptr + token * vocabulary
    divisor = tl.load(divisor_ptr + token)
    target = tl.load(target_ptr + token)
    log_norm = tl.load(log_norm_ptr + token)
    entropy = tl.load(entropy_ptr + token)
    grad_logprob = tl.load(grad_logprob_ptr + token)
    grad_entropy = tl.load(grad_entropy_ptr + token)
    for start in range(0, vocabulary, block):
        column = start + tl.arange(0, block)
        inside = column < vocabulary
        logit = tl.load(row_ptr + column, mask=inside, other=0.0).to(tl.float32) / divisor
        log_p = logit - log_norm
        grad = -tl.exp(log_p) * (grad_logprob + grad_entropy * (log_p + entropy))
        grad += tl.where(column == target, grad_logprob, 0.0)
        tl.store(row_ptr + column, grad.to(raw_ptr.dtype.element_ty), mask=inside)
