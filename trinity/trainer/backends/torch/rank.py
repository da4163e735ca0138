"""`TorchTrainRank`: one process of an engine that is spread over several."""

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from trinity.algorithm.aggregate import LossScope
from trinity.common.models.protocol import WeightTicket
from trinity.synchronizer.channel import WeightChannel
from trinity.synchronizer.ipc import IPCChannel
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.meeting import MeetingPlace
from trinity.trainer.backends.torch.microbatch import MicroBatch
from trinity.trainer.backends.torch.rank_checkpoint import CheckpointParts
from trinity.trainer.backends.torch.settings import TorchEngineSettings
from trinity.trainer.backends.torch.sharding import Ranks, RankSettings
from trinity.trainer.backends.torch.state import ModelState
from trinity.trainer.backends.torch.updates import Share
from trinity.trainer.batch import TrainBatch
from trinity.trainer.engine import ModelRole, TrainedRole
from trinity.trainer.loss import BatchObjective


class TorchTrainRank(TorchTrainEngine, CheckpointParts):
    """Holds its part of every weight; `trinity.trainer.backends.torch.rank_group` leads it.

    Every method that computes is called on all ranks at once, with plans of equal length.
    """

    def __init__(
        self,
        settings: TorchEngineSettings,
        channel: WeightChannel | None,
        rank: RankSettings,
    ) -> None:
        super().__init__(settings, channel)
        self._rank = rank
        self._place = f" at rank {rank.rank}"
        self._meeting = MeetingPlace(rank)
        self._ranks: Ranks | None = None
        self._held = {}

    async def address(self) -> str:
        """Where the ranks can meet, if this is the first; this host in any case."""
        return self._meeting.address()

    async def join(self, address: str) -> None:
        """Meet the other ranks, and load the models."""

        def meet() -> None:
            self._ranks = Ranks(self._rank, self._settings, self._meeting.store(address))
            self._prepare(self._ranks)

        await self._run(meet)

    async def forward_planned(
        self, batch: TrainBatch, which: ModelRole, entropy: bool, plan: Sequence[MicroBatch]
    ) -> dict[str, Tensor]:
        """`forward` of this rank's rows."""
        self._let_go_of_sent()
        return await self._run(lambda: self._forward(batch, which, entropy, plan))

    async def backward_planned(
        self,
        batch: TrainBatch,
        objective: BatchObjective,
        which: TrainedRole,
        plan: Sequence[MicroBatch],
        scope: LossScope,
    ) -> Share:
        """`forward_backward` of this rank's rows."""
        self._let_go_of_sent()
        return await self._run(lambda: self._backward(batch, objective, which, plan, scope))

    async def backward_from(
        self,
        batch: TrainBatch,
        gradient: dict[str, Tensor],
        which: TrainedRole,
        plan: Sequence[MicroBatch],
    ) -> None:
        """Backward pass of this rank's rows from the gradient at their outputs."""
        await self._run(lambda: self._backward_from(batch, gradient, which, plan))

    async def send_weights(self, version: int) -> WeightTicket:
        """All ranks put the weights together; the one with the channel sends them."""
        if self._channel is not None:
            return await super().send_weights(version)
        await self._run(lambda: deque(self._sent_weights(), maxlen=0))
        return WeightTicket(version, "", "", None)

    def _let_go_of_sent(self) -> None:
        """Free the whole weights that an engine on this GPU read: it has, if there is work."""
        if isinstance(self._channel, IPCChannel):
            self._channel.let_go()

    async def close(self) -> None:
        try:
            if self._ranks is not None:
                await self._run(self._ranks.close)
        finally:
            await super().close()

    def _states(self, hf: bool, copies: bool = True) -> dict[str, ModelState]:
        rank, world_size = self._rank.rank, self._rank.world_size
        return {
            role: self._state(role, model, hf, rank, world_size, copies)
            for role, model in self._models.items()
        }
