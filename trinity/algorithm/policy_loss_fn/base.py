"""What a policy loss is to the trainer."""

from collections.abc import Callable
from typing import ClassVar, Literal

from torch import Tensor

from trinity.algorithm.base import Method

Metrics = dict[str, Tensor]


class PolicyLossFn(Method):
    """A policy loss, built from ``algorithm.policy_loss_fn_args``.

    `__call__` names the tensors it wants, all [B, T] (`expert_mask`, `step`, `pair_id` and
    `is_chosen` are [B]), and gives the loss with metrics as 0-d tensors. Of a micro-batch it gives
    that micro-batch's share (see `trinity.algorithm.aggregate`): use `aggregate_loss` for the mean.
    """

    additive: ClassVar[bool] = True
    """Whether shares of micro-batches add up to the loss; if not, the trainer needs two passes."""

    unit: ClassVar[Literal["row", "pair"]] = "row"
    """Rows that must stay in one micro-batch: each on its own, or the two of a preference pair."""

    __call__: Callable[..., tuple[Tensor, Metrics]]
