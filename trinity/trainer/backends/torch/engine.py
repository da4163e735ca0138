"""`TorchTrainEngine`: models, their optimizers and their checkpoints in one process."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from trinity.algorithm.aggregate import LossScope
from trinity.common.constants import ROUTES
from trinity.common.models.adapters import AdapterFolder, adapter_off, merged
from trinity.common.models.allocator import use_tight_memory
from trinity.common.models.protocol import WeightTicket
from trinity.trainer.backends.torch import updates
from trinity.trainer.backends.torch.microbatch import MicroBatch, plan_micro_batches
from trinity.trainer.backends.torch.models import Placement, TrainedModel
from trinity.trainer.backends.torch.out_of_memory import naming_the_setting
from trinity.trainer.backends.torch.packed_model import PackedModel
from trinity.trainer.backends.torch.settings import TorchEngineSettings
from trinity.trainer.backends.torch.sharding import Ranks
from trinity.trainer.backends.torch.state import (
    CheckpointWriter,
    Files,
    HuggingFaceFolder,
    ModelState,
    load_state,
)
from trinity.trainer.backends.torch.varlen import use_flash_attention_4
from trinity.trainer.batch import TrainBatch, infinite_columns
from trinity.trainer.engine import ModelRole, TrainedRole
from trinity.trainer.figures import figures_of_process
from trinity.trainer.loss import BatchObjective
from trinity.utils.log import get_logger
from trinity.utils.memory import release_free_memory

if TYPE_CHECKING:
    from trinity.synchronizer.channel import WeightChannel

T = TypeVar("T")

_NAMED = 3  # weights that a message names
_WRITERS = 4  # files of a checkpoint that a process writes at once


class TorchTrainEngine:
    """A `TrainEngine` on PyTorch alone, on one device.

    All computing happens in one thread of its own, one call after the other, so that the event
    loop stays free to answer. See `trinity.trainer.engine` for the lifecycle.

    Args:
        settings: What to train and how.
        channel: Carries weights to the engines; None if nobody takes them.
    """

    _place = ""
    """Where among several ranks this is, for messages."""

    def __init__(
        self, settings: TorchEngineSettings, channel: "WeightChannel | None" = None
    ) -> None:
        self._settings = settings
        self._channel = channel
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        is_serial = settings.save_strategy == "single_thread"
        self._writer = CheckpointWriter(1 if is_serial else _WRITERS)
        self._logger = get_logger(settings.log_name)
        self._models: dict[TrainedRole, TrainedModel] = {}
        self._reference: PackedModel | None = None
        self._placement: Placement | None = None

    async def prepare(self) -> None:
        await self._run(self._prepare)

    async def forward(
        self, batch: TrainBatch, which: ModelRole = "actor", entropy: bool = False
    ) -> dict[str, Tensor]:
        plan = self._plan(batch, which, None)
        return await self._run(lambda: self._forward(batch, which, entropy, plan))

    async def forward_backward(
        self,
        batch: TrainBatch,
        objective: BatchObjective,
        which: TrainedRole = "actor",
        scope: LossScope | None = None,
    ) -> dict[str, float]:
        scope = scope or updates.scope_of(batch)
        if objective.adds_up(batch):
            plan = self._plan(batch, which, objective)
            share = await self._run(lambda: self._backward(batch, objective, which, plan, scope))
            return updates.Share.total([share], objective.loss_name)
        outputs = await self.forward(batch, which, objective.needs_entropy)
        gradient, share = updates.gradient_at_outputs(outputs, batch, objective, scope)
        plan = self._plan(batch, which, objective)
        await self._run(lambda: self._backward_from(batch, gradient, which, plan))
        return updates.Share.total([share], objective.loss_name)

    async def optim_step(self, which: TrainedRole = "actor") -> dict[str, float]:
        metrics = await self._run(lambda: self._step(which))
        return {f"{which}/{name}": value for name, value in metrics.items()}

    def _step(self, which: TrainedRole) -> dict[str, float]:
        if self._channel is not None and which == "actor":
            self._channel.before_change()
        with self._telling(f"optimizer step of the {which}", has_tokens=False):
            optimizer = self._trained(which).optimizer
            metrics = optimizer.step()
        if optimizer.infinite:
            names, more = optimizer.infinite[:_NAMED], len(optimizer.infinite) - _NAMED
            rest = f" and {more} more" if more > 0 else ""
            text = "Update %d of the %s is left out%s: the gradient is not finite at %s%s."
            where = (optimizer.num_steps, which, self._place, ", ".join(names), rest)
            self._logger.warning(text, *where)
        return metrics

    def _telling(self, phase: str, has_tokens: bool = True) -> AbstractContextManager[None]:
        """Within, running out of GPU memory names the setting to change."""
        return naming_the_setting(self._settings, phase, self._coming_bytes if has_tokens else None)

    def _coming_bytes(self) -> int:
        """GPU memory of gradients, of first moments, and of what ranks put together."""
        models = self._models.values()
        together = max((model.packed.coming_bytes for model in models), default=0)
        return together + sum(model.optimizer.coming_bytes for model in models)

    async def send_weights(self, version: int) -> WeightTicket:
        if self._channel is None:
            raise ValueError("This engine was built without a weight channel.")
        channel = self._channel
        ticket = await self._run(lambda: channel.send(version, self._sent_weights()))
        return replace(ticket, adapter=self._sent_adapter)

    async def save(
        self,
        path: str | Path,
        hf: bool = False,
        files: Files | None = None,
        is_last: bool = False,
    ) -> None:
        await self.wait_saved()
        states = await self._run(lambda: self._states(hf, copies=not is_last))
        self._writer.begin(Path(path), states, files or {})

    async def wait_saved(self) -> None:
        await self._writer.wait()

    async def load(self, path: str | Path, weights_only: bool = False) -> None:
        await self._run(lambda: self._load(Path(path), weights_only))

    async def health(self) -> dict[str, float]:
        actor = self._models.get("actor")
        steps = actor.optimizer.num_steps if actor else 0
        return {**figures_of_process(), "optimizer_steps": float(steps)}

    async def close(self) -> None:
        try:
            await self.wait_saved()
        finally:
            self._thread.shutdown(wait=False)
            if self._channel is not None:
                self._channel.close()

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _prepare(self, ranks: Ranks | None = None) -> None:
        settings = self._settings
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        if settings.device == "cpu":
            use_tight_memory()
        torch.manual_seed(settings.seed)
        with self._telling("loading of the models", has_tokens=False):
            self._load_models(ranks)

    def _load_models(self, ranks: Ranks | None) -> None:
        settings = self._settings
        self._placement = Placement(settings, ranks)
        actor = self._models["actor"] = self._placement.actor()
        if actor.is_random and (ranks is None or ranks.rank == 0):
            self._logger.warning(settings.random_weights)
        if settings.critic is not None:
            self._models["critic"] = self._placement.critic()
        if settings.device == "cpu":
            release_free_memory()  # of weights in float32
        elif use_flash_attention_4(model.packed.model for model in self._models.values()):
            self._logger.info("Attention is computed by FlashAttention 4.")

    def _plan(
        self, batch: TrainBatch, which: ModelRole, objective: BatchObjective | None
    ) -> list[MicroBatch]:
        """Micro-batches with gradient, or without if there is no ``objective``."""
        settings = self._settings
        rule = settings.rule(which, with_gradient=objective is not None)
        idle = None if objective is None else objective.idle_rows(batch)
        return plan_micro_batches(batch, rule, idle, settings.shares_prefixes)

    def _forward(
        self, batch: TrainBatch, which: ModelRole, entropy: bool, plan: Sequence[MicroBatch]
    ) -> dict[str, Tensor]:
        is_base = which == "ref" and self._settings.adapter is not None
        if is_base:  # a reference model of its own would decide on its routes
            batch = batch.without(ROUTES)
        model, is_offloaded = self._model(which)
        rest = adapter_off(model.model) if is_base else nullcontext()
        work = self._working().at_work(model, is_offloaded)
        with self._telling(f"forward pass of the {which}"), rest, work:
            return updates.token_outputs(model, batch, plan, entropy)

    def _backward(
        self,
        batch: TrainBatch,
        objective: BatchObjective,
        which: TrainedRole,
        plan: Sequence[MicroBatch],
        scope: LossScope,
    ) -> updates.Share:
        work = self._working().at_work(*self._model(which))
        with self._telling(f"training pass of the {which}"), work as model:
            share = updates.backward(model, batch, objective, plan, scope)
        if not math.isfinite(share.loss):
            why = infinite_columns(batch) or "what is given is finite, what the model makes is not"
            text = "The loss of the %s is %s%s: %s."
            self._logger.warning(text, which, share.loss, self._place, why)
        return share

    def _backward_from(
        self,
        batch: TrainBatch,
        gradient: dict[str, Tensor],
        which: TrainedRole,
        plan: Sequence[MicroBatch],
    ) -> None:
        work = self._working().at_work(*self._model(which))
        with self._telling(f"training pass of the {which}"), work as model:
            updates.backward_from(model, batch, gradient, plan)

    def _working(self) -> Placement:
        if self._placement is None:
            raise RuntimeError("The engine is not prepared: call prepare() first.")
        return self._placement

    def _model(self, which: ModelRole) -> tuple[PackedModel, bool]:
        """A model, and whether it is offloaded while not used."""
        settings = self._settings
        if which == "ref" and settings.adapter is not None:
            return self._trained("actor").packed, settings.param_offload
        if which == "ref":
            if self._reference is None:
                self._reference = self._working().reference()
            return self._reference, settings.reference_offload
        critic = settings.critic
        is_offloaded = (
            critic is not None and critic.param_offload
            if which == "critic"
            else settings.param_offload
        )
        return self._trained(which).packed, is_offloaded

    def _trained(self, which: TrainedRole) -> TrainedModel:
        self._working()
        if which not in self._models:
            raise ValueError(f"This engine has no {which}: there is none in its settings.")
        return self._models[which]

    @property
    def _sent_adapter(self) -> str | None:
        """Name of the adapter that engines get alone, if there is one."""
        return None if self._settings.adapter is None else self._settings.adapter.name

    def _sent_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What engines get."""
        if self._sent_adapter is not None:
            return self._trained("actor").optimizer.weights.export(trained_only=True)
        return self._whole_weights()

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The actor as any other program loads it, an adapter added in."""
        weights = self._trained("actor").optimizer.weights
        if self._settings.adapter is None:
            return weights.export()
        return merged(weights.export(), weights.model)

    def _states(self, hf: bool, copies: bool = True) -> dict[str, ModelState]:
        return {
            role: self._state(role, model, hf, copies=copies)
            for role, model in self._models.items()
        }

    def _state(
        self,
        role: TrainedRole,
        model: TrainedModel,
        hf: bool,
        rank: int = 0,
        world_size: int = 1,
        copies: bool = True,
    ) -> ModelState:
        """What this process saves of a model; all ranks put together what the first one saves."""
        is_first = rank == 0
        folder = self._hf_folder(role, model, hf, is_first)
        adapter = self._adapter_folder(role, model)
        return ModelState.of(
            model.optimizer,
            folder,
            rank,
            world_size,
            adapter if is_first else None,
            copies,
        )

    def _adapter_folder(self, role: TrainedRole, model: TrainedModel) -> AdapterFolder | None:
        if role != "actor" or self._settings.adapter is None:
            return None
        weights = model.optimizer.weights.export(trained_only=True)
        return AdapterFolder.of(model.packed.model, weights)

    def _hf_folder(
        self, role: TrainedRole, model: TrainedModel, hf: bool, is_kept: bool
    ) -> HuggingFaceFolder | None:
        """The folder, if this process keeps it; all take part in putting weights together."""
        whole = self._whole_weights() if hf and role == "actor" else None
        if not is_kept:
            deque(whole or (), maxlen=0)
            return None
        weights = None
        if whole is not None:
            weights = {name: w.to("cpu", copy=True) for name, w in whole}
        template = self._settings.chat_template
        return HuggingFaceFolder(model.packed.model, model.source, template, weights)

    def _load(self, path: Path, weights_only: bool) -> None:
        for role, model in self._models.items():
            load_state(model.optimizer, path / role, weights_only)
