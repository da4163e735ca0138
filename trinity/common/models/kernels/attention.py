"""Causal attention on the CPU by compiled kernels, with its gradient: queries over spans of keys.

The bits of a query's output depend on the query and the keys it sees alone. Engine and trainer
attend by it, each with keys where it has them.

Shape letters: N = tokens, H = query heads, G = key-value heads, D = head size, T = tasks,
S = spans.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from trinity.common.models.kernels import _native

_WIDTHS = {16, 32, 64, 96, 128}
_EVERY_KEY = 1 << 40


@dataclass(frozen=True)
class AttentionTasks:
    """Runs of queries, each over spans of keys; all tensors are int64.

    A task's first query sees the keys before its place and the one there, the next one more, ...

    Args:
        first_query: [T] row of the task's first query.
        num_queries: [T] queries, one after the other.
        first_place: [T] of the first query among the task's keys.
        spans_end: [T] where the task's spans end in the lists of spans.
        span_first: [S] where a span begins, in strides of `KeyLayout.span_stride`.
        span_length: [S] keys of a span, one after the other.
        trees_end: Where trees of tasks end: tasks of different trees share no keys. For gradients.
        span_skip: [S] strides from key to key that come before the span's first; None: none.
    """

    first_query: Tensor
    num_queries: Tensor
    first_place: Tensor
    spans_end: Tensor
    span_first: Tensor
    span_length: Tensor
    trees_end: Tensor | None = None
    span_skip: Tensor | None = None


@dataclass(frozen=True)
class KeyLayout:
    """How keys and values lie in memory: steps from span to span, key to key and head to head."""

    span_stride: int
    key_stride: int
    head_stride: int

    @staticmethod
    def of_tokens(key_NGD: Tensor) -> "KeyLayout":
        """Keys of tokens in a row; spans begin at tokens."""
        _, heads, size = key_NGD.shape
        return KeyLayout(heads * size, heads * size, size)

    @staticmethod
    def of_rows(key_RGLD: Tensor) -> "KeyLayout":
        """Rows of keys; spans begin at rows."""
        return KeyLayout(key_RGLD.stride(0), key_RGLD.stride(2), key_RGLD.stride(1))


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels take these: one dtype, heads of a size they know, a compiler at hand."""
    size = query.shape[-1]
    is_known = size in _WIDTHS and key.shape[-1] == size and value.shape[-1] == size
    return is_known and _native.are_fit(query, key, value)


_TASK_LISTS = (
    *("first_query", "num_queries", "first_place"),
    *("spans_end", "span_first", "span_skip", "span_length"),
)


class TaskLists(ctypes.Structure):
    """`AttentionTasks` as the kernels read them."""

    _fields_ = [(name, ctypes.c_void_p) for name in _TASK_LISTS]


class Shape(ctypes.Structure):
    """The rest of what they want to know."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("num_tasks", "num_heads", "kv_heads")),
        *((name, ctypes.c_long) for name in ("span_stride", "key_stride", "head_stride")),
        ("window", ctypes.c_long),
        ("scale", ctypes.c_float),
    ]


def attention(
    query_NHD: Tensor,
    key: Tensor,
    value: Tensor,
    tasks: AttentionTasks,
    layout: KeyLayout,
    scale: float,
    window: int | None = None,
    fresh_NGD: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention output [N, H, D], and [N, H] the log of each query's sum of exponentials.

    Of queries that no task has, both are undefined. ``key`` and ``value`` lie in the same way.

    Args:
        fresh_NGD: Keys and values of the queries' own tokens, which are put in their places first.
    """
    out = torch.empty_like(query_NHD)
    log_norm = _native.floats(*query_NHD.shape[:2])
    given = (query_NHD, key, value, *(fresh_NGD or (None, None)), out, log_norm)
    heads = (query_NHD.shape[1], key.shape[1])
    _run("attention", *given, tasks, shape_of(heads, tasks, layout, scale, window))
    return out, log_norm


def attention_backward(
    grad_NHD: Tensor,
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    log_norm_NH: Tensor,
    tasks: AttentionTasks,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients at queries, keys and values, of tokens that are all in some task."""
    trees_end = tasks.trees_end
    assert trees_end is not None, "tasks for gradients are ordered by trees"
    query_grad = torch.empty_like(query_NHD)
    key_grad, value_grad = (torch.zeros(key_NGD.shape, dtype=torch.float32) for _ in range(2))
    given = (grad_NHD, query_NHD, key_NGD, value_NGD, log_norm_NH)
    found = (query_grad, key_grad, value_grad)
    layout = KeyLayout.of_tokens(key_NGD)
    trees = (trees_end, ctypes.c_long(len(trees_end)))
    heads = (query_NHD.shape[1], key_NGD.shape[1])
    shape = shape_of(heads, tasks, layout, scale, window)
    _run("attention_backward", *given, *found, *trees, tasks, shape)
    return query_grad, key_grad.to(key_NGD.dtype), value_grad.to(value_NGD.dtype)


def shape_of(
    heads: tuple[int, int],
    tasks: AttentionTasks,
    layout: KeyLayout,
    scale: float,
    window: int | None,
) -> Shape:
    """What the kernels want to know besides the tasks; ``heads`` of queries and of keys."""
    strides = (layout.span_stride, layout.key_stride, layout.head_stride)
    return Shape(len(tasks.first_query), *heads, *strides, window or _EVERY_KEY, scale)


def lists_of(tasks: AttentionTasks) -> TaskLists:
    """Pointers into ``tasks``, which must outlive them."""
    return TaskLists(*(_native.address(getattr(tasks, name)) for name in _TASK_LISTS))


def _run(name: str, first: Tensor, *given: object) -> None:
    """Call a kernel whose last arguments are tasks and shape, and the size of heads."""
    *tensors, tasks, shape = given
    assert isinstance(tasks, AttentionTasks) and isinstance(shape, Shape)
    described = (ctypes.byref(lists_of(tasks)), ctypes.byref(shape), ctypes.c_long(first.shape[-1]))
    _native.run(name, first.dtype, first, *tensors, *described)
