"""Attention over a packed row on a GPU, by flash kernels for rows of any length: PyTorch's own, or
those of FlashAttention 4 in their place.

A segment's queries see the keys of its whole path, put side by side, and the kernel's causal mask
starts where the path ends: so a prompt that rows share is computed once in every layer, and only
read again in attention. The operator is opaque to `torch.compile` and takes tensors alone, which
are never empty nor the same, so that a layer is compiled once for all packed rows.

Shape letters: N = packed tokens, L = keys, a path's one after the other, H = query heads,
G = key-value heads, D = head size.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import attention as torch_attention
from transformers import PreTrainedModel

from trinity.trainer.backends.torch.packing import Segment

_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_SIZE = 256
_NO_WINDOW = -1
_FA4_MAJORS = (9, 10)  # Hopper and Blackwell
_FA4_HEAD_SIZES = (64, 128)
_ROWS = 8  # of keys and of values that a program of the Triton kernels works on at a time


@dataclass(frozen=True)
class VarlenPlan:
    """Where queries and keys of each segment are.

    Args:
        query_starts, key_starts: [S + 1] int32 where each segment's queries and keys begin.
        counts: [3] int64 on the CPU: most queries and most keys of a segment, and how many keys are
            gathered: 0 where they are the packed row itself, whatever the other fields hold.
        key_index: [L] packed index of each key.
        slots: [L] places in ``key_index`` of each packed token in turn ...
        offsets: ... and [N] where its part of ``slots`` begins.
    """

    query_starts: Tensor
    key_starts: Tensor
    counts: Tensor
    key_index: Tensor
    slots: Tensor
    offsets: Tensor


def plan_varlen(segments: Sequence[Segment], device: torch.device) -> VarlenPlan:
    """The plan of a packed row's segments, which stand in the row in this order."""
    paths = [segment.path() for segment in segments]
    num_queries = torch.tensor([len(s.tokens) for s in segments])
    num_keys = torch.tensor([sum(len(s.tokens) for s in path) for path in paths])
    num_gathered = int(num_keys.sum()) if any(len(path) > 1 for path in paths) else 0
    if num_gathered:
        index = np.concatenate(
            [np.arange(s.offset, s.offset + len(s.tokens)) for path in paths for s in path]
        )
        uses = np.bincount(index, minlength=int(num_queries.sum()))
        found = index, index.argsort(kind="stable"), uses.cumsum() - uses
        key_index, slots, offsets = (sent(torch.from_numpy(part), device) for part in found)
    else:
        key_index, slots, offsets = (
            torch.zeros(2, dtype=torch.long, device=device) for _ in range(3)
        )
    return VarlenPlan(
        sent(_starts(num_queries), device),
        sent(_starts(num_keys), device),
        torch.tensor([int(num_queries.max()), int(num_keys.max()), num_gathered]),
        key_index,
        slots,
        offsets,
    )


def use_flash_attention_4(models: Iterable[PreTrainedModel]) -> bool:
    """Have PyTorch take the kernels of FlashAttention 4 for its own; whether it does.

    They take 0.57 of the time on Hopper. It does so if all ``models`` suit them, and the package
    `flash-attn-4` is there in a version that this PyTorch knows. They are compiled when first
    needed, and kept on the disk.
    """
    activate = getattr(torch_attention, "activate_flash_attention_impl", None)
    if activate is None or find_spec("flash_attn") is None:
        return False
    if torch.cuda.get_device_capability()[0] not in _FA4_MAJORS:
        return False
    if not all(suits_flash_attention_4(model) for model in models):
        return False
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    try:
        activate("FA4")
    except ImportError:
        return False
    return True


def suits_flash_attention_4(model: PreTrainedModel) -> bool:
    """Whether its heads are of a size that those kernels take, and see all tokens before them."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    windows = (getattr(part, "sliding_window", None) for part in (config, *model.modules()))
    return head_size in _FA4_HEAD_SIZES and not any(windows)


def fits_varlen(query: Tensor) -> bool:
    """Whether the kernels take such queries ([..., D])."""
    head_size = query.shape[-1]
    return query.dtype in _DTYPES and head_size % 8 == 0 and head_size <= _MAX_HEAD_SIZE


def varlen_attention(
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    plan: VarlenPlan,
    scale: float,
    window: int | None,
) -> Tensor:
    """[N, H, D] what every token attends to; differentiable."""
    out_NHD: Tensor = _attend(
        query_NHD,
        key_NGD,
        value_NGD,
        plan.query_starts,
        plan.key_starts,
        plan.counts,
        plan.key_index,
        plan.slots,
        plan.offsets,
        scale,
        _NO_WINDOW if window is None else window - 1,
    )[0]
    return out_NHD


@torch.library.custom_op("trinity::varlen_attention", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    counts: Tensor,
    key_index: Tensor,
    slots: Tensor,
    offsets: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    most_queries, most_keys, num_gathered = counts.tolist()
    if num_gathered:
        key, value = _gathered(key, value, key_index)
    out, log_sums, seed, unused, _ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        query_starts,
        key_starts,
        most_queries,
        most_keys,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=None if window < 0 else window,
        window_size_right=None if window < 0 else 0,
    )
    return out, log_sums, seed, unused


@_attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    counts: Tensor,
    key_index: Tensor,
    slots: Tensor,
    offsets: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_heads, _ = query.shape
    return (
        torch.empty_like(query, memory_format=torch.contiguous_format),
        query.new_empty((num_heads, num_tokens), dtype=torch.float32),
        query.new_empty((2,), dtype=torch.uint64),
        query.new_empty((), dtype=torch.uint64),
    )


@torch.library.custom_op("trinity::varlen_attention_backward", mutates_args=())
def _attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    seed: Tensor,
    unused: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    counts: Tensor,
    key_index: Tensor,
    slots: Tensor,
    offsets: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    most_queries, most_keys, num_gathered = counts.tolist()
    if num_gathered:
        key, value = _gathered(key, value, key_index)
    grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
        grad_out.contiguous(),
        query,
        key,
        value,
        out,
        log_sums,
        query_starts,
        key_starts,
        most_queries,
        most_keys,
        0.0,
        True,
        seed,
        unused,
        scale=scale,
        window_size_left=None if window < 0 else window,
        window_size_right=None if window < 0 else 0,
    )
    if num_gathered:
        grad_key, grad_value = _summed(grad_key, grad_value, slots, offsets)
    return grad_query, grad_key, grad_value


@_attend_backward.register_fake
def _(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(  # type: ignore[return-value]  # three
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value)
    )


def _gathered(key: Tensor, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """[L, G, D] the keys and the values of the packed tokens in ``index``."""
    from trinity.trainer.backends.torch.triton_gather import gather_rows

    key, value = key.contiguous(), value.contiguous()
    shape, width = (len(index), *key.shape[1:]), key[0].numel()
    found = key.new_empty(shape), value.new_empty(shape)
    gather_rows[(-(-len(index) // _ROWS),)](
        *(key, value, *found, index),
        *(len(index), width),
        rows=_ROWS,
        block=_power_of_two(width),
    )
    return found


def _summed(
    grad_key: Tensor, grad_value: Tensor, slots: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """[N, G, D] sums over all places where a packed token was a key, in a fixed order."""
    from trinity.trainer.backends.torch.triton_gather import sum_slots

    key, value = grad_key.contiguous(), grad_value.contiguous()
    shape, width = (len(offsets), *key.shape[1:]), key[0].numel()
    found = key.new_empty(shape), value.new_empty(shape)
    sum_slots[(len(offsets),)](
        *(key, value, *found, slots, offsets),
        *(len(offsets), len(slots), width),
        rows=_ROWS,
        block=_power_of_two(width),
        num_warps=1,  # then a thread has all rows of its columns
    )
    return found


def _power_of_two(width: int) -> int:
    return 1 << (width - 1).bit_length()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, scale, window = inputs
    out, log_sums, seed, unused = output
    ctx.save_for_backward(*tensors[:3], out, log_sums, seed, unused, *tensors[3:])
    ctx.scale, ctx.window = scale, window


def _backward(ctx: Any, grad_out: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    found = _attend_backward(grad_out, *ctx.saved_tensors, ctx.scale, ctx.window)
    return (*found, *[None] * 8)


_attend.register_autograd(_backward, setup_context=_keep)


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """On the device; on a GPU once that gets there: nobody waits for what it has to do before."""
    if device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
