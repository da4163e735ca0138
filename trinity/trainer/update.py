"""One batch into optimizer steps: epochs, mini-batches, actor and critic.

The batches nest as veRL's do: a training step takes ``train_batch_size`` experiences, each epoch
over them is cut into mini-batches (by default one, the whole step), and each mini-batch is one
optimizer step; the engine cuts it into micro-batches, which changes nothing but memory.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trinity.trainer.batch import TrainBatch
from trinity.trainer.engine import TrainedRole, TrainEngine
from trinity.trainer.loss import BatchObjective, Objective
from trinity.utils.metrics import Metrics, extreme_in
from trinity.utils.timer import timed


@dataclass
class Updater:
    """Turns a completed batch into optimizer steps.

    Args:
        engine: Computes gradients and applies them.
        objective: The actor's loss.
        critic_objective: The critic's; None if there is no critic.
        epochs: Times each batch is gone through.
        mini_batch_size: Experiences of one optimizer step, of which a preference pair is one; None:
            all of the batch.
        shuffle: Draw the rows of mini-batches at random, by ``seed`` and step.
        critic_warmup: First steps in which only the critic learns.
    """

    engine: TrainEngine
    objective: Objective
    critic_objective: BatchObjective | None = None
    epochs: int = 1
    mini_batch_size: int | None = None
    shuffle: bool = False
    critic_warmup: int = 0
    seed: int = 42

    async def update(self, batch: TrainBatch, step: int, metrics: Metrics) -> None:
        """All optimizer steps of training step ``step``; what they tell goes into ``metrics``."""
        found: dict[str, list[float]] = defaultdict(list)
        for mini_batch in self._mini_batches(batch, step):
            if self.critic_objective is not None:
                with timed(metrics, "time/update_critic"):
                    await self._step(mini_batch, self.critic_objective, "critic", found)
            if step > self.critic_warmup:
                with timed(metrics, "time/update_actor"):
                    await self._step(mini_batch, self.objective, "actor", found)
        for name, values in found.items():
            extreme = extreme_in(name)
            metrics[name] = extreme(values) if extreme else sum(values) / len(values)
        if "actor/ratio_max_deviation" in found:
            metrics["actor/first_ratio_max_deviation"] = found["actor/ratio_max_deviation"][0]

    async def _step(
        self,
        batch: TrainBatch,
        objective: BatchObjective,
        which: TrainedRole,
        found: dict[str, list[float]],
    ) -> None:
        if batch.num_trained_tokens == 0:
            return
        metrics = await self.engine.forward_backward(batch, objective, which=which)
        metrics |= await self.engine.optim_step(which=which)
        if which == "actor":
            self.objective.after_step(metrics, int(batch["action_mask"].any(dim=1).sum()))
        for name, value in metrics.items():
            found[name].append(value)

    def _mini_batches(self, batch: TrainBatch, step: int) -> Iterator[TrainBatch]:
        units = batch.units()
        size = self.mini_batch_size or len(units)
        for epoch in range(self.epochs):
            if size >= len(units) and not self.shuffle:
                yield batch
                continue
            order = self._order(len(units), step, epoch)
            for start in range(0, len(units), size):
                chosen = order[start : start + size]
                yield batch.select([row for place in chosen for row in units[place]])

    def _order(self, count: int, step: int, epoch: int) -> list[int]:
        """Places of the experiences, as they come or drawn at random."""
        if not self.shuffle:
            return list(range(count))
        generator = torch.Generator().manual_seed(hash((self.seed, step, epoch)) % 2**63)
        return torch.randperm(count, generator=generator).tolist()
