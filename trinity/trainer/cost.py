"""What a training step costs, as metrics: FLOPs used of those there are, time a token, memory."""

from collections.abc import Mapping
from dataclasses import dataclass

from trinity.common.config.shape import ModelShape
from trinity.trainer.batch import TrainBatch
from trinity.trainer.split import split_rows
from trinity.utils.metrics import Metrics

_TIMED = ("old_log_prob", "ref", "values", "adv", "update_actor", "update_critic")
_MEMORY = {
    "perf/max_memory_allocated_gb": "peak_gpu_memory_mb",
    "perf/max_memory_reserved_gb": "peak_reserved_gpu_memory_mb",
    "perf/cpu_memory_used_gb": "used_memory_mb",
}
_UPDATE = 3
"""Forward passes that a forward and a backward pass cost."""


@dataclass(frozen=True)
class StepCost:
    """How metrics come from a batch, from times, and from figures of the engine.

    Args:
        num_parts: Ranks that have rows of their own.
        actor: Size of the model; None if it is not known, and its utilisation isn't either.
        critic: The same of the critic.
        epochs: Times that a batch is gone through.
    """

    num_parts: int = 1
    actor: ModelShape | None = None
    critic: ModelShape | None = None
    epochs: int = 1

    def metrics(
        self, batch: TrainBatch, times: Mapping[str, float], figures: Mapping[str, float]
    ) -> Metrics:
        """All there is of ``perf/``, ``timing_per_token_ms/`` and ``global_seqlen/``.

        Args:
            times: Seconds, such as ``time/update_actor``.
            figures: What `TrainEngine.health` tells.
        """
        found = {name: figures[key] / 1024 for name, key in _MEMORY.items() if key in figures}
        for name in _TIMED:
            if f"time/{name}" in times:
                per_token = 1000 * times[f"time/{name}"] / batch.num_tokens
                found[f"timing_per_token_ms/{name}"] = per_token
        if figures.get("peak_flops"):
            found |= self._utilisation(batch, times, figures["peak_flops"])
        return found | self._balance(batch)

    def _utilisation(
        self, batch: TrainBatch, times: Mapping[str, float], peak_flops: float
    ) -> Metrics:
        """Model FLOPs of each part by what all ranks could have computed in its time."""
        trained_B = batch["action_mask"].any(dim=1)
        lengths, num_logits = batch.lengths[trained_B].tolist(), batch.num_trained_tokens
        passes = _UPDATE * self.epochs
        found: Metrics = {}
        if self.actor is not None:
            forward = self.actor.forward_flops(lengths, num_logits)
            found["actor"] = passes * forward / times.get("time/update_actor", float("inf"))
            found["actor_infer"] = forward / times.get("time/old_log_prob", float("inf"))
        if self.critic is not None:
            forward = self.critic.forward_flops(lengths, 0)
            found["critic"] = passes * forward / times.get("time/update_critic", float("inf"))
        return {f"perf/mfu/{name}": rate / peak_flops for name, rate in found.items() if rate}

    def _balance(self, batch: TrainBatch) -> Metrics:
        """Tokens of each rank's rows, if they were dealt out in their order and as they are."""
        in_order, balanced = (
            [int(batch.lengths[rows].sum()) for rows in split_rows(batch, self.num_parts, balances)]
            for balances in (False, True)
        )
        sizes = {
            "min": min(in_order),
            "max": max(in_order),
            "minmax_diff": max(in_order) - min(in_order),
            "balanced_min": min(balanced),
            "balanced_max": max(balanced),
            "mean": sum(balanced) / self.num_parts,
        }
        return {f"global_seqlen/{name}": float(size) for name, size in sizes.items()}
