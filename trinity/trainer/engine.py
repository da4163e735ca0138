"""What computes updates, seen from outside: the `TrainEngine` protocol."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from trinity.algorithm.aggregate import LossScope
from trinity.common.models.protocol import WeightTicket
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import BatchObjective

ModelRole = Literal["actor", "ref", "critic"]
TrainedRole = Literal["actor", "critic"]


class TrainEngine(Protocol):
    """Holds models and their optimizers, and computes on them.

    Lifecycle: ``prepare`` -> ``load``, if a run goes on -> for each optimizer step any number of
    ``forward``, one ``forward_backward``, one ``optim_step`` -> ``close``. A batch given to
    ``forward_backward`` is the batch of a whole optimizer step: the engine cuts it into
    micro-batches, and the result does not depend on the cut.
    """

    async def prepare(self) -> None:
        """Load the models and be ready."""
        ...

    async def forward(
        self, batch: TrainBatch, which: ModelRole = "actor", entropy: bool = False
    ) -> dict[str, Tensor]:
        """``logprob`` (and ``entropy``), or ``values`` of the critic: [B, T], 0 where masked."""
        ...

    async def forward_backward(
        self,
        batch: TrainBatch,
        objective: BatchObjective,
        which: TrainedRole = "actor",
        scope: LossScope | None = None,
    ) -> dict[str, float]:
        """Gradient of ``objective`` on ``batch``, added to what is there; its metrics.

        Args:
            scope: Counts of the whole optimizer step; None: ``batch`` is the whole step.
        """
        ...

    async def optim_step(self, which: TrainedRole = "actor") -> dict[str, float]:
        """Clip, update the weights, forget the gradient; ``grad_norm`` and ``lr`` as metrics."""
        ...

    async def send_weights(self, version: int) -> WeightTicket:
        """Send the actor's weights, by Hugging Face name, through the engine's channel."""
        ...

    async def save(
        self,
        path: str | Path,
        hf: bool = False,
        files: Mapping[str, str | bytes] | None = None,
        is_last: bool = False,
    ) -> None:
        """Begin to save all that a resume needs as the folder ``path``.

        Returns once the state is copied; writing goes on in the background until `wait_saved`.
        Raises what an earlier save failed of, if nobody has waited for that one.

        Args:
            path: ``.../global_step_N``; it appears whole or not at all.
            hf: Also write the actor's weights to ``actor/huggingface``.
            files: Further small files of that folder, by name.
            is_last: Nothing changes the state until `wait_saved`, so it need not be copied.
        """
        ...

    async def wait_saved(self) -> None:
        """Wait for the save under way; raises what it failed of."""
        ...

    async def load(self, path: str | Path, weights_only: bool = False) -> None:
        """Go on from the checkpoint folder ``path``; ``weights_only`` leaves the optimizer new."""
        ...

    async def health(self) -> dict[str, float]:
        """Figures for the log: peak memory in MB, steps done."""
        ...

    async def close(self) -> None: ...
