"""What a batch needs before its gradient: reference logprobs, values, KL in reward, advantages."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trinity.algorithm.advantage_fn.base import AdvantageFn
from trinity.algorithm.kl_fn.base import KLFn
from trinity.algorithm.utils import masked_mean, sampled
from trinity.trainer.batch import TrainBatch
from trinity.trainer.engine import TrainEngine
from trinity.utils.metrics import Metrics
from trinity.utils.timer import timed

#: Importance weights for the gap between engine and trainer: tensors of the batch -> changes of it.
Correction = Callable[[dict[str, Tensor]], tuple[dict[str, Tensor], Metrics]]


@dataclass
class Preparation:
    """Completes a batch, calling the engine only for what the algorithm asks for.

    Args:
        engine: Computes logprobs and values.
        advantage_fn: Advantages computed in the trainer; None if the experiences bring theirs.
        kl_penalty_fn: KL taken off the reward; None for none.
        needs_reference: The loss or the reward compares with the reference model.
        has_critic: Values are computed by a critic.
        recomputes_old_logprobs: Take the trainer's own logprobs as old ones, instead of the
            engine's (`algorithm.bypass_old_logprobs: false`).
        needs_entropy: The advantage reads the entropy of the old policy.
        correction: Rollout correction, given engine and trainer logprobs.
    """

    engine: TrainEngine
    advantage_fn: AdvantageFn | None = None
    kl_penalty_fn: KLFn | None = None
    needs_reference: bool = False
    has_critic: bool = False
    recomputes_old_logprobs: bool = False
    needs_entropy: bool = False
    correction: Correction | None = None

    async def complete(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
        """``batch`` with all columns that its loss will read."""
        if self.recomputes_old_logprobs or self.needs_entropy or self.correction is not None:
            batch = await self._with_old_logprobs(batch, metrics)
        if self.needs_reference:
            with timed(metrics, "time/ref"):
                found = await self.engine.forward(batch, which="ref")
            batch = batch.with_columns(ref_logprob=found["logprob"])
        if self.has_critic:
            with timed(metrics, "time/values"):
                found = await self.engine.forward(batch, which="critic")
            batch = batch.with_columns(old_values=found["values"], values=found["values"])
        with timed(metrics, "time/adv"):
            return self._with_advantages(batch, metrics)

    async def _with_old_logprobs(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
        with timed(metrics, "time/old_log_prob"):
            found = await self.engine.forward(batch, which="actor", entropy=self.needs_entropy)
        columns = batch.columns()
        rollout = columns.get("old_logprob", found["logprob"])
        diff = (found["logprob"].exp() - rollout.exp())[sampled(columns)].abs()
        if len(diff):
            metrics["training/rollout_probs_diff_mean"] = float(diff.mean())
            metrics["training/rollout_probs_diff_max"] = float(diff.max())
            metrics["training/rollout_probs_diff_std"] = float(diff.std(correction=0))
        batch = batch.with_columns(rollout_log_probs=rollout)
        if self.needs_entropy:
            given = {name: found[name] for name in ("entropy", "necs") if name in found}
            batch = batch.with_columns(**given)
            metrics["actor/entropy"] = float(masked_mean(found["entropy"], columns["action_mask"]))
        if self.recomputes_old_logprobs or self.correction is not None:
            batch = batch.with_columns(old_logprob=found["logprob"])
        if self.correction is not None:
            changed, found_metrics = self.correction(batch.columns())
            batch = batch.with_columns(**changed)
            metrics |= found_metrics
        return batch

    def _with_advantages(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
        columns = batch.columns()
        mask_BT = columns["action_mask"]
        if self.advantage_fn is None:
            _describe(columns, mask_BT, metrics)
            return batch.with_columns(**_weighted(columns))
        rewards_BT = _scores(columns, self.advantage_fn)
        if self.kl_penalty_fn is not None:
            rewards_BT, found = self.kl_penalty_fn.apply_kl_penalty_to_reward(
                rewards_BT, columns["old_logprob"], columns["ref_logprob"], mask_BT
            )
            metrics |= {f"critic/{name}": value for name, value in found.items()}
        batch = batch.with_columns(token_level_rewards=rewards_BT)
        columns = batch.columns()
        advantages_BT, returns_BT, found = self.advantage_fn(columns)
        metrics |= found
        columns = {**columns, "advantages": advantages_BT, "returns": returns_BT}
        loss_mask_BT, found = self.advantage_fn.loss_mask(columns, advantages_BT)
        metrics |= found
        _describe(columns, mask_BT, metrics)
        return batch.with_columns(
            returns=returns_BT, action_mask=loss_mask_BT, **_weighted(columns)
        )


def _scores(columns: dict[str, Tensor], advantage_fn: AdvantageFn) -> Tensor:
    """Rewards by token; zeros for a method that learns from a teacher, whose rows may have none."""
    if "token_level_scores" not in columns and "teacher_logprobs" in advantage_fn.requires:
        return torch.zeros_like(columns["action_mask"], dtype=torch.float32)
    return columns["token_level_scores"]


def _weighted(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Advantages times the weights of a rollout correction: losses are linear in them."""
    if "advantages" not in columns:
        return {}
    weights = columns.get("rollout_weights")
    advantages = columns["advantages"]
    return {"advantages": advantages if weights is None else advantages * weights}


def _describe(columns: dict[str, Tensor], mask_BT: Tensor, metrics: Metrics) -> None:
    """Mean, max and min of scores, rewards, advantages, returns and values under ``critic/``."""
    live_B = mask_BT.any(dim=1)
    for name in ("token_level_scores", "token_level_rewards"):
        if name in columns and bool(live_B.any()):
            label = "score" if name == "token_level_scores" else "rewards"
            _spread(f"critic/{label}", columns[name].sum(dim=1)[live_B], metrics)
    if "values" in columns and "returns" in columns and bool(mask_BT.any()):
        left = (columns["returns"] - columns["values"])[mask_BT].var(correction=0)
        spread = columns["returns"][mask_BT].var(correction=0)
        metrics["critic/vf_explained_var"] = float(1 - left / (spread + 1e-5))
    for name in ("advantages", "returns", "values"):
        if name in columns and bool(mask_BT.any()):
            _spread(f"critic/{name}", columns[name][mask_BT], metrics)


def _spread(name: str, values: Tensor, metrics: Metrics) -> None:
    values = torch.nan_to_num(values.float())
    metrics[f"{name}/mean"] = float(values.mean())
    metrics[f"{name}/max"] = float(values.max())
    metrics[f"{name}/min"] = float(values.min())
