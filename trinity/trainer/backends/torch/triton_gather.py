"""Triton kernels of `trinity.trainer.backends.torch.varlen`: keys and values copied, summed up."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def gather_rows(
    key_ptr,
    value_ptr,
    gathered_key_ptr,
    gathered_value_ptr,
    index_ptr,
    num_rows,
    width,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Rows of two tensors, as ``index`` names them; a program copies ``rows`` of each."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, block)[None, :]
    inside = (row < num_rows)[:, None] & (column < width)
    source = tl.load(index_ptr + row, mask=row < num_rows, other=0)[:, None] * width + column
    found = row[:, None] * width + column
    tl.store(gathered_key_ptr + found, tl.load(key_ptr + source, mask=inside), mask=inside)
    tl.store(gathered_value_ptr + found, tl.load(value_ptr + source, mask=inside), mask=inside)


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
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Add up the rows of two tensors that belong to a token, in a fixed order, in float32.

    A program works on one token, and reads ``rows`` rows at a time.
    """
    token = tl.program_id(0).to(tl.int64)
    first = tl.load(offsets_ptr + token)
    end = tl.load(offsets_ptr + token + 1, mask=token + 1 < num_tokens, other=num_slots)
    column = tl.arange(0, block)
    key_sum = tl.zeros((block,), dtype=tl.float32)
    value_sum = tl.zeros((block,), dtype=tl.float32)
    for start in range(first, end, rows):
        place = start + tl.arange(0, rows)
        inside = (place < end)[:, None] & (column < width)[None, :]
        slot = tl.load(slots_ptr + place, mask=place < end, other=0)
        row = slot[:, None] * width + column[None, :]
        key_sum += tl.sum(tl.load(key_ptr + row, mask=inside, other=0.0).to(tl.float32), axis=0)
        value_sum += tl.sum(tl.load(value_ptr + row, mask=inside, other=0.0).to(tl.float32), axis=0)
    found = token * width + column
    tl.store(key_sum_ptr + found, key_sum.to(key_sum_ptr.dtype.element_ty), mask=column < width)
    tl.store(
        value_sum_ptr + found, value_sum.to(value_sum_ptr.dtype.element_ty), mask=column < width
    )
