"""The entropy bonus: what the trainer subtracts from the loss, to keep the policy exploring."""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from trinity.algorithm.aggregate import aggregate_loss, as_metric
from trinity.algorithm.base import Method

Metrics = dict[str, Tensor]


class EntropyLossFn(Method):
    """An entropy bonus, built from ``algorithm.entropy_loss_fn_args``; ``loss = policy - bonus``.

    `__call__` names its tensors as a policy loss does, and takes ``loss_agg_mode`` by keyword.
    """

    needs_entropy: ClassVar[bool] = True
    """Whether the entropy of every token has to be computed."""

    __call__: Callable[..., tuple[Tensor, Metrics]]


class DefaultEntropyLossFn(EntropyLossFn):
    """``entropy_coef`` times the mean entropy.

    Args:
        entropy_coef: Weight of the bonus; at 0 the entropy is only a metric.
    """

    def __init__(self, entropy_coef: float = 0.0) -> None:
        self.entropy_coef = entropy_coef

    def __call__(
        self, entropy: Tensor, action_mask: Tensor, *, loss_agg_mode: str = "token-mean"
    ) -> tuple[Tensor, Metrics]:
        mean = aggregate_loss(entropy, action_mask, loss_agg_mode)
        return self.entropy_coef * mean, {"entropy_loss": as_metric(mean, action_mask)}


class MixEntropyLossFn(EntropyLossFn):
    """As `default`, of the rows that are not expert data.

    Args:
        entropy_coef: Weight of the bonus; at 0 the entropy is only a metric.
    """

    def __init__(self, entropy_coef: float = 0.0) -> None:
        self.entropy_coef = entropy_coef

    def __call__(
        self,
        entropy: Tensor,
        action_mask: Tensor,
        expert_mask: Tensor,
        *,
        loss_agg_mode: str = "token-mean",
    ) -> tuple[Tensor, Metrics]:
        usual_BT = action_mask.bool() & ~expert_mask.bool()[:, None]
        mean = aggregate_loss(entropy, usual_BT, loss_agg_mode, part="usual")
        return self.entropy_coef * mean, {"entropy_loss": as_metric(mean, action_mask)}


class NoEntropyLossFn(EntropyLossFn):
    """No entropy bonus, and no entropy computed."""

    needs_entropy = False

    def __call__(
        self, logprob: Tensor, *, loss_agg_mode: str = "token-mean"
    ) -> tuple[Tensor, Metrics]:
        return logprob.new_zeros(()), {}
