"""The one place where a loss is put together: policy loss, KL and entropy as one `Objective`."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from trinity.algorithm.additivity import adds_up
from trinity.algorithm.aggregate import count_of, mean_metric
from trinity.algorithm.entropy_loss_fn import ENTROPY_LOSS_FN
from trinity.algorithm.entropy_loss_fn.entropy import EntropyLossFn
from trinity.algorithm.kl_fn import KL_FN
from trinity.algorithm.kl_fn.base import PER_TOKEN, KLFn
from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN
from trinity.algorithm.policy_loss_fn.base import PolicyLossFn
from trinity.trainer.batch import TrainBatch

Metrics = dict[str, Tensor]
Args = Mapping[str, Any]


class BatchObjective(Protocol):
    """What a training engine minimises: of the actor an `Objective`, of the critic a value loss."""

    loss_name: str
    """Metric under which the loss itself is reported."""

    @property
    def needs_entropy(self) -> bool:
        """Whether the model has to give the entropy of every trained token."""
        ...

    def adds_up(self, batch: TrainBatch) -> bool:
        """Whether shares of micro-batches add up to the loss."""
        ...

    def idle_rows(self, batch: TrainBatch) -> Tensor:
        """[B] True on rows that most likely have no gradient: a hint, which is checked."""
        ...

    def __call__(self, outputs: Mapping[str, Tensor], batch: TrainBatch) -> tuple[Tensor, Metrics]:
        """Loss, or inside a `loss_scope` its share, of what the model says of a batch."""
        ...


class Objective:
    """What an optimizer step of the actor minimises: policy loss - entropy bonus + KL.

    Called with what the model says of a batch (``logprob`` [B, T], ``entropy`` if
    `needs_entropy`), it gives a scalar and metrics by their final names. Called inside a
    `loss_scope` on a part of the batch, it gives that part's share. It pickles, and holds no
    tensors.
    """

    loss_name = "actor/final_loss"

    def __init__(
        self,
        policy_loss_fn: PolicyLossFn,
        kl_loss_fn: KLFn | None = None,
        entropy_loss_fn: EntropyLossFn | None = None,
        loss_agg_mode: str = "token-mean",
    ) -> None:
        self.policy_loss_fn = policy_loss_fn
        self.kl_loss_fn = kl_loss_fn if kl_loss_fn and kl_loss_fn.needs_reference else None
        self.entropy_loss_fn = entropy_loss_fn
        self.loss_agg_mode = loss_agg_mode
        self._adds_up: bool | None = None

    @classmethod
    def from_names(
        cls,
        policy_loss_fn: str,
        policy_loss_fn_args: Args | None = None,
        kl_loss_fn: str = "none",
        kl_loss_fn_args: Args | None = None,
        entropy_loss_fn: str = "none",
        entropy_loss_fn_args: Args | None = None,
        loss_agg_mode: str | None = None,
    ) -> "Objective":
        """The objective of an ``algorithm`` section: names in the registries, and their settings.

        ``loss_agg_mode`` goes to the policy loss too, unless its own args or its own default say
        otherwise: a default other than "token-mean" is part of the method.
        """
        policy_class = POLICY_LOSS_FN.get(policy_loss_fn)
        args = dict(policy_loss_fn_args or {})
        if loss_agg_mode and policy_class.default_args().get("loss_agg_mode") == "token-mean":
            args.setdefault("loss_agg_mode", loss_agg_mode)
        return cls(
            policy_class(**args),
            KL_FN.get(kl_loss_fn)(**(kl_loss_fn_args or {})),
            ENTROPY_LOSS_FN.get(entropy_loss_fn)(**(entropy_loss_fn_args or {})),
            loss_agg_mode or "token-mean",
        )

    @property
    def needs_entropy(self) -> bool:
        """Whether the model has to give the entropy of every trained token."""
        in_bonus = self.entropy_loss_fn is not None and self.entropy_loss_fn.needs_entropy
        return in_bonus or "entropy" in self.policy_loss_fn.inputs()

    @property
    def needs_reference(self) -> bool:
        """Whether the batch has to have ``ref_logprob``."""
        in_policy = "ref_logprob" in self.policy_loss_fn.inputs()
        is_optional = "ref_logprob" in self.policy_loss_fn.optional_inputs()
        return self.kl_loss_fn is not None or (in_policy and not is_optional)

    def adds_up(self, batch: TrainBatch) -> bool:
        """Whether shares of micro-batches add up to the loss; a plugin's loss is tried out once."""
        if self._adds_up is None:
            self._adds_up = adds_up(self.policy_loss_fn, batch.columns())
        return self._adds_up

    def after_step(self, metrics: Mapping[str, float], num_rows: int) -> None:
        """Move an adaptive KL coefficient by the KL of the optimizer step that was made.

        ``num_rows`` are those with a trained token.
        """
        name = f"actor/{PER_TOKEN}"
        if self.kl_loss_fn is not None and name in metrics:
            self.kl_loss_fn.update_kl_coef(metrics[name], num_rows)

    @property
    def unit(self) -> Literal["row", "pair"]:
        """Rows that a micro-batch must not split."""
        return self.policy_loss_fn.unit

    def idle_rows(self, batch: TrainBatch) -> Tensor:
        """[B] True on rows that most likely have no gradient: a hint, which is checked.

        True where all advantages are 0, if nothing but these make the loss act on the policy: no
        bonus or KL, no regulariser, no expert data.
        """
        inputs = self.policy_loss_fn.inputs()
        has_more = (
            getattr(self.entropy_loss_fn, "entropy_coef", 0.0)
            or getattr(self.policy_loss_fn, "regularizer_coef", 0.0)
            or self.kl_loss_fn is not None
        )
        if has_more or "advantages" not in inputs or "advantages" not in batch:
            return torch.zeros(len(batch), dtype=torch.bool)
        weight_BT = batch["advantages"].masked_fill(~batch["action_mask"], 0.0)
        is_idle_B = ~weight_BT.any(dim=1)
        return is_idle_B & ~batch["expert_mask"].bool() if "expert_mask" in inputs else is_idle_B

    def __call__(self, outputs: Mapping[str, Tensor], batch: TrainBatch) -> tuple[Tensor, Metrics]:
        tensors = {**batch.columns(), **outputs}
        loss, metrics = self.policy_loss_fn(**_pick(self.policy_loss_fn, tensors))
        if self.entropy_loss_fn is not None:
            bonus, found = self.entropy_loss_fn(
                **_pick(self.entropy_loss_fn, tensors, leave_out="loss_agg_mode"),
                loss_agg_mode=self.loss_agg_mode,
            )
            loss, metrics = loss - bonus, metrics | found
        if self.kl_loss_fn is not None:
            kl, found = self.kl_loss_fn.calculate_kl_loss(
                tensors["logprob"],
                _get(tensors, "ref_logprob", self.kl_loss_fn),
                tensors["action_mask"],
                self.loss_agg_mode,
                tensors.get("old_logprob"),
            )
            loss, metrics = loss + kl, metrics | found
        metrics |= _ratio_metrics(tensors)
        return loss, {f"actor/{name}": value for name, value in metrics.items()}


def _get(tensors: Mapping[str, Tensor], name: str, wanted_by: object) -> Tensor:
    if name not in tensors:
        raise ValueError(
            f"{type(wanted_by).__name__} needs {name!r}, which this batch has not: at least one of "
            f"its experiences came without. It has {', '.join(sorted(tensors))}."
        )
    return tensors[name]


def _pick(
    method: PolicyLossFn | EntropyLossFn, tensors: Mapping[str, Tensor], leave_out: str = ""
) -> dict[str, Tensor]:
    """The tensors that ``method`` names; optional ones only if they are there."""
    names = [name for name in method.inputs() if name != leave_out]
    optional = set(method.optional_inputs())
    return {
        name: _get(tensors, name, method)
        for name in names
        if name in tensors or name not in optional
    }


@torch.no_grad()
def _ratio_metrics(tensors: Mapping[str, Tensor]) -> Metrics:
    """How far the policy is from the one that sampled: 0 and 1 in a synchronous first step.

    Rows of expert data, which it did not sample, are left out.
    """
    if "old_logprob" not in tensors:
        return {}
    action_mask, rows, part = tensors["action_mask"].bool(), None, "all"
    if "expert_mask" in tensors:
        rows, part = ~tensors["expert_mask"].bool(), "usual"
    mask_BT = action_mask if rows is None else action_mask & rows[:, None]
    if not count_of(mask_BT, part).tokens:
        return {}
    log_ratio_BT = torch.where(mask_BT, tensors["logprob"] - tensors["old_logprob"], 0.0)
    ratio_BT = log_ratio_BT.exp()
    return {
        "ppo_kl": mean_metric(-log_ratio_BT, action_mask, rows, part),
        "ratio_mean": mean_metric(ratio_BT, action_mask, rows, part),
        "ratio_max_deviation": (ratio_BT - 1).abs().max(),
    }
