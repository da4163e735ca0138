"""Maximum likelihood, plain and weighted by the token's own probability.

Plain SFT; SFT weighted by probability (dynamic fine-tuning, arXiv:2508.05629); and SFT weighted by
``phi = p (1 - p)`` (CHORD, arXiv:2508.11408), which spares what the policy already knows and what
is foreign to it.
"""

import math

import torch
from torch import Tensor

from trinity.algorithm.aggregate import aggregate_loss, as_metric
from trinity.algorithm.policy_loss_fn.base import Metrics, PolicyLossFn
from trinity.algorithm.utils import visible


class SFTPolicyLossFn(PolicyLossFn):
    """``-logprob`` of every trained token, averaged.

    Args:
        loss_agg_mode: See `trinity.algorithm.aggregate.aggregate_loss`.
    """

    metric_name = "sft_loss"

    def __init__(self, loss_agg_mode: str = "token-mean") -> None:
        self.loss_agg_mode = loss_agg_mode

    def __call__(self, logprob: Tensor, action_mask: Tensor) -> tuple[Tensor, Metrics]:
        return self.share(logprob, action_mask)

    def share(
        self,
        logprob: Tensor,
        action_mask: Tensor,
        rows: Tensor | None = None,
        part: str = "all",
    ) -> tuple[Tensor, Metrics]:
        """The loss over ``rows`` ([B] bool; all if None) as a mean over ``part`` of the step."""
        mask_BT = action_mask.bool() if rows is None else action_mask.bool() & rows[:, None]
        [logprob] = visible(mask_BT, logprob)
        loss_BT = self.token_loss(logprob)
        loss = aggregate_loss(loss_BT, mask_BT, self.loss_agg_mode, part=part)
        return loss, {self.metric_name: as_metric(loss, action_mask)}

    def token_loss(self, logprob: Tensor) -> Tensor:
        """[B, T] loss of each token."""
        return -logprob


class SFTISPolicyLossFn(SFTPolicyLossFn):
    """``-sg(p) logprob``.

    Args:
        loss_agg_mode: See `trinity.algorithm.aggregate.aggregate_loss`.
    """

    def token_loss(self, logprob: Tensor) -> Tensor:
        return -logprob * logprob.detach().exp()


class PhiSFTPolicyLossFn(SFTPolicyLossFn):
    """``-sg(p (1 - p)) logprob``.

    Args:
        cutoff_prob: Tokens likelier than this get no gradient; 1 cuts none.
        loss_agg_mode: See `trinity.algorithm.aggregate.aggregate_loss`.
    """

    metric_name = "sft_phi_loss"

    def __init__(self, cutoff_prob: float = 1.0, loss_agg_mode: str = "token-mean") -> None:
        if not 0 < cutoff_prob <= 1:
            raise ValueError(f"cutoff_prob is {cutoff_prob}; it must be above 0 and at most 1.")
        super().__init__(loss_agg_mode)
        self.cutoff_prob = cutoff_prob

    def token_loss(self, logprob: Tensor) -> Tensor:
        if self.cutoff_prob < 1:
            logprob = torch.clamp(logprob, max=math.log(self.cutoff_prob))
        probability = logprob.detach().exp()
        return -logprob * probability * (1 - probability)
