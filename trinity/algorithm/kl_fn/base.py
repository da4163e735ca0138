"""KL between the policy and the reference: in the loss, in the reward, and its coefficient.

Shape suffixes: B = rows, T = response tokens (padded).
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from trinity.algorithm.aggregate import aggregate_loss, as_metric, mean_metric
from trinity.algorithm.base import Method
from trinity.algorithm.utils import masked_mean, visible

Metrics = dict[str, Tensor]

PER_TOKEN = "kl_per_token"
"""Metric by which an adaptive coefficient of the loss is steered: nats."""

_MAX_RELATIVE_ERROR = 0.2


class KLFn(Method, ABC):
    """An estimator of the KL per token, with its coefficient.

    The coefficient is fixed, or steered to a target by the proportional controller of
    arXiv:1909.08593, section 2.2: after each batch it is multiplied by
    ``1 + clip(kl / target_kl - 1, -0.2, 0.2) * batch_size / horizon``, and never by less than 0.8:
    with a batch far above the horizon it would turn negative, and drive the policy away.

    Args:
        adaptive: Steer the coefficient.
        kl_coef: The coefficient, or the one to start from.
        target_kl: KL to steer to, in nats per token; needed if ``adaptive``.
        horizon: Rows over which the controller acts; needed if ``adaptive``.
    """

    needs_reference: bool = True
    """Whether a reference model has to run for this estimator."""

    def __init__(
        self,
        adaptive: bool = False,
        kl_coef: float = 0.001,
        target_kl: float | None = None,
        horizon: float | None = None,
    ) -> None:
        if adaptive and (not target_kl or not horizon or target_kl < 0 or horizon < 0):
            raise ValueError(
                f"adaptive KL needs target_kl and horizon above 0; they are {target_kl} and "
                f"{horizon}. Set both, or adaptive: false."
            )
        self.adaptive = adaptive
        self.kl_coef = kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    @abstractmethod
    def calculate_kl(
        self, logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor | None = None
    ) -> Tensor:
        """[B, T] estimate of KL(policy || reference) at each token."""

    def calculate_kl_loss(
        self,
        logprob: Tensor,
        ref_logprob: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        old_logprob: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """The share of the KL in the loss; metrics have it without the coefficient.

        Of an adaptive one there is `PER_TOKEN` too, whatever the loss is a mean of.
        """
        kl_BT = self._masked_kl(logprob, ref_logprob, response_mask, old_logprob)
        kl = aggregate_loss(kl_BT, response_mask, loss_agg_mode)
        coef = torch.tensor(self.kl_coef, device=kl.device)
        metrics = {"kl_loss": as_metric(kl, response_mask), "kl_coef": coef}
        if self.adaptive:
            metrics[PER_TOKEN] = mean_metric(kl_BT, response_mask)
        return kl * self.kl_coef, metrics

    def apply_kl_penalty_to_reward(
        self,
        token_level_scores: Tensor,
        old_logprob: Tensor,
        ref_logprob: Tensor,
        action_mask: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """``score - kl_coef * kl`` of each token of a whole batch, then the controller's update.

        The policy is the one that sampled (``old_logprob``). The metric ``kl`` is the mean over
        rows of the mean over their tokens, and ``kl_coef`` the coefficient that was applied.
        """
        kl_BT = self._masked_kl(old_logprob, ref_logprob, action_mask, old_logprob)
        is_live_B = action_mask.bool().any(dim=1)
        kl = float(masked_mean(masked_mean(kl_BT, action_mask, axis=1), is_live_B))
        metrics = {"kl": kl, "kl_coef": self.kl_coef}
        rewards_BT = token_level_scores - self.kl_coef * kl_BT
        self.update_kl_coef(kl, int(is_live_B.sum()))
        return rewards_BT, metrics

    def update_kl_coef(self, current_kl: float, batch_size: int) -> None:
        """Move the coefficient after a batch of ``batch_size`` rows with a trained token.

        A fixed one stays, and each does after a KL that is no number: it would be lost for good.
        """
        if not self.adaptive or self.target_kl is None or self.horizon is None:
            return
        if math.isnan(current_kl):
            return
        error = current_kl / self.target_kl - 1
        error = min(max(error, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)
        change = 1 + error * batch_size / self.horizon
        self.kl_coef *= max(change, 1 - _MAX_RELATIVE_ERROR)

    def state_dict(self) -> dict[str, float]:
        """What a resume needs: the coefficient as it stands."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.adaptive:
            self.kl_coef = state["kl_coef"]

    def _masked_kl(
        self, logprob: Tensor, ref_logprob: Tensor, mask: Tensor, old_logprob: Tensor | None
    ) -> Tensor:
        """The estimate where ``mask`` holds, 0 elsewhere, whatever stands under the mask."""
        policy, reference = visible(mask, logprob, ref_logprob)
        old = None if old_logprob is None else visible(mask, old_logprob)[0]
        return visible(mask, self.calculate_kl(policy, reference, old))[0]
