"""One batch into optimizer steps: epochs, mini-batches, actor and critic.

The batches nest as veRL's do: a training step takes ``train_batch_size`` rows, each epoch over
them is cut into mini-batches (by default one, the whole step), and each mini-batch is one
optimizer step; the engine cuts it into micro-batches, which changes nothing but memory.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trinity.trainer.batch import TrainBatch
from trinity.trainer.engine import TrainedRole, TrainEngine
from trinity.trainer.loss import BatchObjective, Objective
from trinity.utils.metrics import Metrics
from trinity.utils.timer import timed


@dataclass
class Updater:
    """Turns a completed batch into optimizer steps.

    Args:
        engine: Computes gradients and applies them.
        objective: The actor's loss.
        critic_objective: The critic's; None if there is no critic.
        epochs: Times each batch is gone through.
        mini_batch_size: Rows of one optimizer step; None: all of the batch.
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
        """All optimizer steps of training step ``step``; their metrics' means into ``metrics``."""
        found: dict[str, list[float]] = defaultdict(list)
        for mini_batch in self._mini_batches(batch, step):
            if self.critic_objective is not None:
                with timed(metrics, "time/update_critic"):
                    await self._step(mini_batch, self.critic_objective, "critic", found)
            if step > self.critic_warmup:
                with timed(metrics, "time/update_actor"):
                    await self._step(mini_batch, self.objective, "actor", found)
        for name, values in found.items():
            metrics[name] = max(values) if name.endswith("max") else sum(values) / len(values)
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
            self.objective.after_step(metrics, len(batch))
        for name, value in metrics.items():
            found[name].append(value)

    def _mini_batches(self, batch: TrainBatch, step: int) -> Iterator[TrainBatch]:
        size = self.mini_batch_size or len(batch)
        for epoch in range(self.epochs):
            if size >= len(batch) and not self.shuffle:
                yield batch
                continue
            for rows in self._row_blocks(batch, size, step, epoch):
                yield batch.select(rows)

    def _row_blocks(
        self, batch: TrainBatch, size: int, step: int, epoch: int
    ) -> Iterator[torch.Tensor]:
        """Indices of each mini-batch; rows that must stay together (pairs) do."""
        units = batch.units()
        if self.shuffle:
            generator = torch.Generator().manual_seed(hash((self.seed, step, epoch)) % 2**63)
            units = [units[i] for i in torch.randperm(len(units), generator=generator).tolist()]
        block: list[int] = []
        for unit in units:
            if block and len(block) + len(unit) > size:
                yield torch.tensor(block)
                block = []
            block += unit
        if block:
            yield torch.tensor(block)
