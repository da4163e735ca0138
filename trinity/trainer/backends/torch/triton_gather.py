"""Triton kernel of `trinity.trainer.backends.torch.varlen`: a program works on one packed token."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def sum_slots(
    key_ptr,
    value_ptr,
    key_sum_ptr,
    value_sum_ptr,
    slots_ptr,
    offsets_ptr,
    num_tokens,
    num_slots,
    width,
    block: tl.constexpr,
):
    """Add up the rows of two tensors that belong to the token, in their order, in float32."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.load(offsets_ptr + token)
    end = tl.load(offsets_ptr + token + 1, mask=token + 1 < num_tokens, other=num_slots)
    column = tl.arange(0, block)
    inside = column < width
    key_sum = tl.zeros((block,), dtype=tl.float32)
    value_sum = tl.zeros((block,), dtype=tl.float32)
    for place in range(first, end):
        row = tl.load(slots_ptr + place) * width + column
        key_sum += tl.load(key_ptr + row, mask=inside, other=0.0).to(tl.float32)
        value_sum += tl.load(value_ptr + row, mask=inside, other=0.0).to(tl.float32)
    found = token * width + column
    tl.store(key_sum_ptr + found, key_sum.to(key_sum_ptr.dtype.element_ty), mask=inside)
    tl.store(value_sum_ptr + found, value_sum.to(value_sum_ptr.dtype.element_ty), mask=inside)
