"""Softmax attention whose bits for a row depend on that row alone, whatever else is computed.

Every product has a shape that depends on the sequence alone (whole queries, blocks of keys), never
on what else is in the batch.

Shape suffixes: B = rows of a product, H = query heads, K = key/value heads, M = queries of a row,
L = key positions, D = head size.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Keys of one product: matrix libraries cut longer sums in ways that depend on their length. Up to
# here keys of weight 0 at the end change nothing, if they come in whole grains.
_BLOCK = 128
_QUERIES = 4  # queries of one product: fewer take other kernels, whose sums differ in the last bit
_LANES = 1024  # values of an element-wise exp: a rest would take its scalar path, which differs too


@dataclass(frozen=True)
class AttentionOptions:
    """How a layer attends: scale of the scores, window, soft cap, sinks [H]."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def tiled_attention(
    query_BKMD: Tensor,
    key_BKLD: Tensor,
    value_BKLD: Tensor,
    bias_BKML: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Softmax attention [B, K, M, D].

    A row's bits depend on its own keys alone: not on the other rows and queries, nor on how many
    keys of bias -inf come after its own. L must be whole grains; ``bias_BKML`` may be broadcast.
    """
    is_plain = options.softcap is None and options.sinks is None
    is_fused = is_plain and query_BKMD.shape[-1] == value_BKLD.shape[-1]
    if is_fused and query_BKMD.device.type != "cpu":
        return nn.functional.scaled_dot_product_attention(
            query_BKMD, key_BKLD, value_BKLD, attn_mask=bias_BKML, scale=options.scale
        )
    num_queries = query_BKMD.shape[2]
    query_BKMD, bias_BKML = _whole_queries(query_BKMD, bias_BKML)
    if is_fused:
        out = _fused_attention(query_BKMD, key_BKLD, value_BKLD, bias_BKML, options.scale)
    else:
        out = _float_attention(
            query_BKMD.float(), key_BKLD.float(), value_BKLD.float(), bias_BKML.float(), options
        )
    return out[:, :, :num_queries].to(query_BKMD.dtype)


def _whole_queries(query_BKMD: Tensor, bias_BKML: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and bias padded to a whole number of query groups."""
    missing = -query_BKMD.shape[2] % _QUERIES
    if not missing:
        return query_BKMD, bias_BKML
    if bias_BKML.shape[2] > 1:
        bias_BKML = nn.functional.pad(bias_BKML, (0, 0, 0, missing))
    return nn.functional.pad(query_BKMD, (0, 0, 0, missing)), bias_BKML


def _float_attention(
    query_BKMD: Tensor,
    key_BKLD: Tensor,
    value_BKLD: Tensor,
    bias_BKML: Tensor,
    options: AttentionOptions,
) -> Tensor:
    batch, heads, num_queries, _ = query_BKMD.shape
    length = key_BKLD.shape[2]
    query = query_BKMD.reshape(batch * heads, num_queries, -1)
    score = torch.bmm(query, key_BKLD.flatten(0, 1).transpose(1, 2)).mul_(options.scale)
    if options.softcap is not None:
        score = torch.tanh(score / options.softcap) * options.softcap
    score_BKML = score.view(batch, heads, num_queries, length) + bias_BKML
    weight = _softmax(score_BKML, options.sinks).view(batch * heads, num_queries, length)
    value = value_BKLD.flatten(0, 1)
    out = torch.bmm(weight[..., :_BLOCK], value[:, :_BLOCK])
    for start in range(_BLOCK, length, _BLOCK):
        now = slice(start, start + _BLOCK)
        out.baddbmm_(weight[..., now], value[:, now])
    return out.view(batch, heads, num_queries, -1)


def _softmax(score_BKML: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return torch.softmax(score_BKML, dim=-1)
    batch, heads, num_queries, length = score_BKML.shape
    sink = sinks.float().view(1, heads, -1, 1)
    sink = sink.expand(batch, heads, -1, num_queries // sink.shape[2])
    sink_BKM1 = sink.reshape(batch, heads, num_queries, 1)
    return torch.softmax(torch.cat([score_BKML, sink_BKM1], dim=-1), dim=-1)[..., :length]


def _fused_attention(
    query_BKMD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, bias_BKML: Tensor, scale: float
) -> Tensor:
    """Fused attention per block of keys, merged by the log-sum-exp of each."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    parts, totals = [], []
    for start in range(0, key_BKLD.shape[2], _BLOCK):
        now = slice(start, start + _BLOCK)
        bias = bias_BKML[..., now]
        part, total = fused(
            query_BKMD, key_BKLD[:, :, now], value_BKLD[:, :, now], attn_mask=bias, scale=scale
        )
        if key_BKLD.shape[2] <= _BLOCK:
            return part
        is_empty = bias.amax(dim=-1) == -math.inf
        parts.append(part.float())
        totals.append(total.masked_fill(is_empty, -math.inf))
    return _merged(parts, totals)


def _merged(part_BKMD: list[Tensor], total_BKM: list[Tensor]) -> Tensor:
    """Attention over all keys from that over blocks of them and each block's log-sum-exp."""
    out, total = part_BKMD[0], total_BKM[0]
    for part, more in zip(part_BKMD[1:], total_BKM[1:], strict=True):
        share, total = _blended(total, more)
        out = torch.lerp(part, out, share[..., None])
    return out


def _blended(first_BKM: Tensor, second_BKM: Tensor) -> tuple[Tensor, Tensor]:
    """Share of the first in the sum of two log-sum-exps, and the log of that sum."""
    shape, count = first_BKM.shape, first_BKM.numel()
    missing = -count % _LANES
    first, second = (
        nn.functional.pad(x.reshape(-1), (0, missing)) for x in (first_BKM, second_BKM)
    )
    total = torch.logaddexp(first, second)
    share = (first - total).exp().nan_to_num(1.0)
    return share[:count].view(shape), total[:count].view(shape)
