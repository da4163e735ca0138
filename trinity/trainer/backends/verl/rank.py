"""`VerlTrainRank`: one process of veRL's engines, led by the torch trainer's `RankGroup`."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from trinity.algorithm.aggregate import LossScope
from trinity.common.models.protocol import WeightTicket
from trinity.synchronizer.channel import WeightChannel
from trinity.trainer.backends.torch.meeting import MeetingPlace
from trinity.trainer.backends.torch.microbatch import MicroBatch
from trinity.trainer.backends.torch.rank_checkpoint import CheckpointParts
from trinity.trainer.backends.torch.sharding import Ranks, RankSettings
from trinity.trainer.backends.torch.state import (
    CheckpointWriter,
    HuggingFaceFolder,
    ModelState,
)
from trinity.trainer.backends.torch.updates import Share
from trinity.trainer.backends.verl.compat import load_engines, require_verl
from trinity.trainer.backends.verl.settings import VerlEngineSettings
from trinity.trainer.batch import TrainBatch
from trinity.trainer.engine import ModelRole, TrainedRole
from trinity.trainer.figures import figures_of_process
from trinity.trainer.loss import BatchObjective
from trinity.utils.log import get_logger

if TYPE_CHECKING:
    from trinity.trainer.backends.verl.model import VerlModel

T = TypeVar("T")


class VerlTrainRank(CheckpointParts):
    """Holds its part of every model, in engines of veRL.

    Called like a `TorchTrainRank`: what computes is called on all ranks at once. Of a plan only the
    rows count; veRL cuts them into micro-batches itself. There is one even where one is all.
    """

    def __init__(
        self, settings: VerlEngineSettings, channel: WeightChannel | None, rank: RankSettings
    ) -> None:
        self._settings = settings
        self._channel = channel
        self._rank = rank
        self._meeting = MeetingPlace(rank)
        self._ranks: Ranks | None = None
        self._models: dict[ModelRole, VerlModel] = {}
        self._held: dict[str, ModelState] = {}
        self._writer = CheckpointWriter()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._logger = get_logger(settings.log_name)

    async def address(self) -> str:
        """Where the ranks can meet, if this is the first; this host in any case."""
        require_verl(self._settings.strategy)
        return self._meeting.address()

    async def join(self, address: str) -> None:
        """Meet the other ranks, and load the models."""
        await self._run(lambda: self._join(address))

    async def forward_planned(
        self, batch: TrainBatch, which: ModelRole, entropy: bool, plan: Sequence[MicroBatch]
    ) -> dict[str, Tensor]:
        """``logprob`` (and ``entropy``), or ``values``, of this rank's rows."""
        return await self._run(lambda: self._model(which).outputs(batch, _rows(plan), entropy))

    async def backward_planned(
        self,
        batch: TrainBatch,
        objective: BatchObjective,
        which: TrainedRole,
        plan: Sequence[MicroBatch],
        scope: LossScope,
    ) -> Share:
        """Add this rank's part of the gradient of an objective whose shares add up."""
        return await self._run(
            lambda: self._model(which).backward(batch, _rows(plan), objective, scope)
        )

    async def backward_from(
        self,
        batch: TrainBatch,
        gradient: dict[str, Tensor],
        which: TrainedRole,
        plan: Sequence[MicroBatch],
    ) -> None:
        """Backward pass of this rank's rows from the gradient at their outputs."""
        await self._run(lambda: self._model(which).backward_from(batch, _rows(plan), gradient))

    async def optim_step(self, which: TrainedRole = "actor") -> dict[str, float]:
        """Clip, update the weights, forget the gradient."""
        metrics = await self._run(lambda: self._model(which).step())
        return {f"{which}/{name}": value for name, value in metrics.items()}

    async def send_weights(self, version: int) -> WeightTicket:
        """All ranks put the weights together; the one with the channel sends them."""
        channel, model = self._channel, self._model("actor")
        if channel is not None:
            return await self._run(lambda: channel.send(version, model.export()))
        await self._run(lambda: deque(model.export(), maxlen=0))
        return WeightTicket(version, "", "", None)

    async def load(self, path: str | Path, weights_only: bool = False) -> None:
        """Go on from a checkpoint folder of either trainer, or of veRL."""
        await self._run(lambda: self._load(Path(path), weights_only))

    async def health(self) -> dict[str, float]:
        """Figures for the log: peak memory in MB, steps done."""
        steps = self._models["actor"].num_steps if self._models else 0
        return {**figures_of_process(), "optimizer_steps": float(steps)}

    async def close(self) -> None:
        """Leave the other ranks."""
        try:
            await self._writer.wait()
            for model in self._models.values():
                model.close()
            if self._ranks is not None:
                await self._run(self._ranks.close)
        finally:
            self._thread.shutdown(wait=False)
            if self._channel is not None:
                self._channel.close()

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _join(self, address: str) -> None:
        settings = self._settings
        load_engines(settings.device, settings.strategy)
        from trinity.trainer.backends.verl.configs import check_keys

        check_keys(settings.verl, settings.strategy)
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        self._ranks = Ranks(self._rank, settings, self._meeting.store(address))
        torch.manual_seed(settings.seed)
        actor = self._model("actor")
        if settings.critic is not None:
            self._model("critic")
        if settings.strategy == "fsdp" and settings.device == "cpu":
            self._logger.info("veRL's fsdp starts on GPUs only; fsdp2 does its work here.")
        if actor.is_random and self._rank.rank == 0:
            self._logger.warning(settings.random_weights)

    def _model(self, which: ModelRole) -> "VerlModel":
        """A model; it is loaded when it is first asked for."""
        if self._ranks is None:
            raise RuntimeError("The engine is not prepared: call prepare() first.")
        if which not in self._models:
            self._models[which] = self._new_model(which)
        return self._models[which]

    def _new_model(self, which: ModelRole) -> "VerlModel":
        from trinity.trainer.backends.verl.model import VerlModel

        return VerlModel(which, self._settings)

    def _trained(self) -> dict[str, "VerlModel"]:
        return {role: model for role, model in self._models.items() if role != "ref"}

    def _states(self, hf: bool) -> dict[str, ModelState]:
        from trinity.trainer.backends.verl.state import copy_of

        rank, world_size = self._rank.rank, self._rank.world_size
        states = {}
        for role, model in self._trained().items():
            folder = self._hf_folder(model, hf and role == "actor")
            states[role] = copy_of(model, folder, rank, world_size)
        return states

    def _hf_folder(self, model: "VerlModel", has_weights: bool) -> HuggingFaceFolder | None:
        """The folder, on the first rank; all take part in putting weights together."""
        whole = model.export() if has_weights else None
        if self._rank.rank:
            deque(whole or (), maxlen=0)
            return None
        weights = None if whole is None else {n: w.to("cpu", copy=True) for n, w in whole}
        return HuggingFaceFolder(model.plain, model.source, self._settings.chat_template, weights)

    def _load(self, path: Path, weights_only: bool) -> None:
        from trinity.trainer.backends.verl.state import load

        for role, model in self._trained().items():
            load(model, path / role, self._rank.rank, weights_only)


def _rows(plan: Sequence[MicroBatch]) -> list[int]:
    return [row for micro in plan for row in micro.rows]
