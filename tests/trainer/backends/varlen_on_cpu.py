"""The attention of GPUs' packed rows on a CPU, for tests of what is compiled around it.

Shape letters as in `trinity.trainer.backends.torch.varlen`; Q = queries and L = keys of a segment.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from trinity.trainer.backends.torch import attention_plan, varlen


def register() -> None:
    """Take it for models in float32, in this process."""
    varlen._attend.register_kernel("cpu")(_attend)
    varlen._attend_backward.register_kernel("cpu")(_attend_backward)
    varlen._DTYPES = (torch.float32,)
    attention_plan.AttentionPlan = _Plan


class _Plan(attention_plan.AttentionPlan):
    def __init__(self, packed, device):
        super().__init__(packed, device)
        self.varlen = varlen.plan_varlen(packed.segments, device)


def _attend(query, key, value, query_starts, key_starts, counts, key_index, *rest):
    scale = rest[-2]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for now, at in _segments(key, query_starts, key_starts, counts, key_index):
        share_HQL, _, value_HLD = _shares(query[now], key[at], value[at], scale)
        out[now] = (share_HQL @ value_HLD).transpose(0, 1)
    log_sums = query.new_zeros((query.shape[1], len(query)))
    unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, log_sums, *unused


def _attend_backward(grad_out, query, key, value, *rest):
    query_starts, key_starts, counts, key_index, *_, scale, _ = rest[4:]
    found = [torch.zeros(t.shape, dtype=t.dtype) for t in (query, key, value)]
    for now, at in _segments(key, query_starts, key_starts, counts, key_index):
        share_HQL, key_HLD, value_HLD = _shares(query[now], key[at], value[at], scale)
        grad_HQD = grad_out[now].transpose(0, 1)
        grad_HQL = grad_HQD @ value_HLD.transpose(1, 2)
        grad_HQL = share_HQL * (grad_HQL - (grad_HQL * share_HQL).sum(-1, keepdim=True)) * scale
        found[0][now] = (grad_HQL @ key_HLD).transpose(0, 1)
        grad_key = grad_HQL.transpose(1, 2) @ query[now].transpose(0, 1)
        grad_value = share_HQL.transpose(1, 2) @ grad_HQD
        for total, grad_HLD in ((found[1], grad_key), (found[2], grad_value)):
            by_group = grad_HLD.unflatten(0, (key.shape[1], -1)).sum(1)
            total.index_add_(0, at, by_group.transpose(0, 1))
    return tuple(found)


def _segments(key, query_starts, key_starts, counts, key_index) -> Iterator[tuple[slice, Tensor]]:
    """Places of each segment's queries, and of its keys."""
    index = key_index if counts[2] else torch.arange(len(key))
    for s in range(len(query_starts) - 1):
        now = slice(int(query_starts[s]), int(query_starts[s + 1]))
        yield now, index[int(key_starts[s]) : int(key_starts[s + 1])]


def _shares(query_QHD, key_LGD, value_LGD, scale) -> tuple[Tensor, Tensor, Tensor]:
    repeats = query_QHD.shape[1] // key_LGD.shape[1]
    key_HLD, value_HLD = (
        t.transpose(0, 1).repeat_interleave(repeats, 0) for t in (key_LGD, value_LGD)
    )
    scores_HQL = query_QHD.transpose(0, 1) @ key_HLD.transpose(1, 2) * scale
    num_queries, num_keys = scores_HQL.shape[1:]
    first = num_keys - num_queries
    seen = torch.arange(num_keys) <= torch.arange(num_queries)[:, None] + first
    return scores_HQL.masked_fill(~seen, float("-inf")).softmax(-1), key_HLD, value_HLD
