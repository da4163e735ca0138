"""Ulysses (arXiv:2309.14509): ranks that share the tokens of the same rows.

Outside attention each of S ranks holds a part of the tokens of a packed row; for attention they
trade places, so that each holds all tokens of a part of the heads.

Shape letters: N = packed tokens, n = those of one rank, H = heads, G = key heads, D = head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers import AttentionInterface

from trinity.trainer.backends.torch import attention
from trinity.trainer.backends.torch.attention_plan import AttentionPlan

IMPLEMENTATION = "trinity_ulysses"


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share rows, seen from one of them.

    Args:
        rank: Place of this rank among them.
        size: How many they are.
        group: How they talk to each other.
    """

    rank: int
    size: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, rank: int, world_size: int, size: int) -> "SequenceGroup | None":
        """The group of ``rank``, where ``size`` ranks side by side share rows; None for 1.

        All ranks call this together.
        """
        if size == 1:
            return None
        if world_size % size:
            raise ValueError(f"{size} ranks share a sequence, but there are {world_size} ranks.")
        groups = [dist.new_group(range(r, r + size)) for r in range(0, world_size, size)]
        return cls(rank % size, size, groups[rank // size])

    def hidden(
        self,
        backbone: Callable[..., Tensor],
        token_ids: Tensor,
        position_ids: Tensor,
        plan: AttentionPlan,
    ) -> Tensor:
        """[N, E] what ``backbone`` gives for a packed row, each rank computing its part."""
        num_tokens = len(token_ids)
        plan_of_all = SharedPlan(plan, num_tokens, self)
        found = backbone(self.part(token_ids), self.part(position_ids), plan_of_all)
        return _Gather.apply(found, self)[:num_tokens]

    def part(self, values: Tensor) -> Tensor:
        """[n, ...] this rank's of [N, ...], zeros behind the last."""
        share = -(-len(values) // self.size)
        missing = share * self.size - len(values)
        padded = pad(values, (0, 0) * (values.ndim - 1) + (0, missing))
        return padded[self.rank * share : (self.rank + 1) * share]


@dataclass(frozen=True)
class SharedPlan:
    """An attention plan for a whole row of ``num_tokens``, and who shares it."""

    whole: AttentionPlan
    num_tokens: int
    ranks: SequenceGroup


def ulysses_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_plan: SharedPlan,
    **options: Any,  # as transformers passes them on
) -> tuple[Tensor, None]:
    """Attention function of transformers: query [1, H, n, D], key and value [1, G, n, D]."""
    ranks, plan, num_tokens = attention_plan.ranks, attention_plan.whole, attention_plan.num_tokens
    check_heads(query.shape[1], key.shape[1], ranks.size)
    repeats = max(1, ranks.size // key.shape[1])
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    rows = [_heads_of_all_tokens(t, ranks)[:, :, :num_tokens] for t in (query, key, value)]
    out, _ = attention.packed_attention(
        module, rows[0], rows[1], rows[2], None, attention_plan=plan, **options
    )
    return _tokens_of_all_heads(out, query.shape[2], ranks), None


def check_heads(num_heads: int, kv_heads: int, size: int) -> None:
    """Refuse heads that ``size`` ranks can't share evenly.

    Raises:
        ValueError: With the numbers.
    """
    if num_heads % size or (kv_heads % size and size % kv_heads):
        raise ValueError(
            f"{size} ranks share a sequence (trainer.ulysses_sequence_parallel_size), but can't "
            f"share the model's {num_heads} attention heads and {kv_heads} key heads evenly."
        )


def _heads_of_all_tokens(part: Tensor, ranks: SequenceGroup) -> Tensor:
    """[1, H, n, D] -> [1, H / S, S * n, D]."""
    by_rank = part[0].unflatten(0, (ranks.size, -1))
    return _Trade.apply(by_rank, ranks).transpose(0, 1).flatten(1, 2)[None]


def _tokens_of_all_heads(whole: Tensor, share: int, ranks: SequenceGroup) -> Tensor:
    """[1, N, H / S, D] -> [1, n, H, D]."""
    padded = pad(whole[0], (0, 0, 0, 0, 0, share * ranks.size - whole.shape[1]))
    by_rank = padded.unflatten(0, (ranks.size, share))
    return _Trade.apply(by_rank, ranks).transpose(0, 1).flatten(1, 2)[None]


class _Trade(torch.autograd.Function):
    """Part r of the first axis goes to rank r; what comes from rank r is part r of the result."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, ranks: SequenceGroup) -> Tensor:  # autograd's context
        ctx.ranks = ranks
        return _trade(parts, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _trade(grad, ctx.ranks), None


class _Gather(torch.autograd.Function):
    """All ranks' tokens. All ranks compute the same with them: gradients are not added up."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: SequenceGroup) -> Tensor:  # autograd's context
        ctx.ranks, ctx.share = ranks, len(part)
        part = part.contiguous()
        whole = part.new_empty(ranks.size * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(_bytes(whole), _bytes(part), group=ranks.group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.ranks.rank * ctx.share :][: ctx.share], None


def _trade(parts: Tensor, ranks: SequenceGroup) -> Tensor:
    parts = parts.contiguous()
    found = torch.empty_like(parts)
    dist.all_to_all_single(_bytes(found), _bytes(parts), group=ranks.group)
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory, in a dtype that every way of talking knows."""
    return tensor.view(torch.uint8)


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers; twice does no harm."""
    AttentionInterface.register(IMPLEMENTATION, ulysses_attention)
