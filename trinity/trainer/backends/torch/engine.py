"""`TorchTrainEngine`: a model, its optimizer and its checkpoints in one process."""

import asyncio
import resource
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from trinity.algorithm.aggregate import LossScope
from trinity.common.models.loading import load_causal_lm
from trinity.common.models.protocol import WeightTicket
from trinity.synchronizer.channel import WeightChannel
from trinity.trainer.backends.torch import updates
from trinity.trainer.backends.torch.optimizer import MasterOptimizer
from trinity.trainer.backends.torch.policy import Policy
from trinity.trainer.backends.torch.settings import TorchEngineSettings
from trinity.trainer.backends.torch.state import CheckpointWriter, ModelState, load_state
from trinity.trainer.batch import TrainBatch
from trinity.trainer.engine import ModelRole, TrainedRole
from trinity.trainer.loss import Objective
from trinity.utils.log import get_logger

T = TypeVar("T")


class TorchTrainEngine:
    """A `TrainEngine` on PyTorch alone, on one device.

    All computing happens in one thread of its own, one call after the other, so that the event
    loop stays free to answer. See `trinity.trainer.engine` for the lifecycle.

    Args:
        settings: What to train and how.
        channel: Carries weights to the engines; None if nobody takes them.
    """

    def __init__(self, settings: TorchEngineSettings, channel: WeightChannel | None = None) -> None:
        self._settings = settings
        self._channel = channel
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._writer = CheckpointWriter()
        self._logger = get_logger("trainer")
        self._actor: Policy | None = None
        self._optimizer: MasterOptimizer | None = None
        self._reference: Policy | None = None

    async def prepare(self) -> None:
        await self._run(self._prepare)

    async def forward(
        self, batch: TrainBatch, which: ModelRole = "actor", entropy: bool = False
    ) -> dict[str, Tensor]:
        rule = self._settings.micro_batches
        return await self._run(
            lambda: updates.token_outputs(self._policy(which), batch, rule, entropy)
        )

    async def forward_backward(
        self,
        batch: TrainBatch,
        objective: Objective,
        which: TrainedRole = "actor",
        scope: LossScope | None = None,
    ) -> dict[str, float]:
        rule = self._settings.micro_batches
        whole = scope or updates.scope_of(batch)
        return await self._run(
            lambda: updates.backward(self._policy(which), batch, objective, rule, whole)
        )

    async def optim_step(self, which: TrainedRole = "actor") -> dict[str, float]:
        metrics = await self._run(self._trained().step)
        return {f"{which}/{name}": value for name, value in metrics.items()}

    async def send_weights(self, version: int) -> WeightTicket:
        if self._channel is None:
            raise ValueError("This engine was built without a weight channel.")
        channel = self._channel
        weights = self._policy("actor").model.named_parameters
        return await self._run(lambda: channel.send(version, weights()))

    async def save(
        self, path: str | Path, hf: bool = False, files: Mapping[str, str | bytes] | None = None
    ) -> None:
        await self.wait_saved()
        state = await self._run(lambda: self._state(hf))
        self._writer.begin(Path(path), {"actor": state}, files or {})

    async def wait_saved(self) -> None:
        await self._writer.wait()

    async def load(self, path: str | Path, weights_only: bool = False) -> None:
        await self._run(lambda: self._load(Path(path), weights_only))

    async def health(self) -> dict[str, float]:
        peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        steps = self._optimizer.num_steps if self._optimizer else 0
        return {"peak_memory_mb": peak_kb / 1024, "optimizer_steps": float(steps)}

    async def close(self) -> None:
        try:
            await self.wait_saved()
        finally:
            self._thread.shutdown(wait=False)
            if self._channel is not None:
                self._channel.close()

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _prepare(self) -> None:
        settings = self._settings
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        torch.manual_seed(settings.seed)
        self._actor = self._load_policy()
        model = self._actor.model.train()
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._optimizer = MasterOptimizer(model.named_parameters(), settings.optimizer)

    def _load_policy(self) -> Policy:
        settings = self._settings
        model, is_random = load_causal_lm(
            settings.model_path,
            settings.dtype,
            settings.seed,
            device=settings.device,
            trust_remote_code=settings.trust_remote_code,
            config_overrides=settings.config_overrides,
        )
        if is_random:
            self._logger.warning(
                "%s has no weights: they are random, from seed %d.",
                settings.model_path,
                settings.seed,
            )
        return Policy(model, settings.temperature, settings.shares_prefixes)

    def _policy(self, which: ModelRole) -> Policy:
        if which == "critic":
            raise ValueError("This engine has no critic.")
        if which == "ref":
            if self._reference is None:
                self._reference = self._load_policy()
                self._reference.model.requires_grad_(False)
            return self._reference
        if self._actor is None:
            raise RuntimeError("The engine is not prepared: call prepare() first.")
        return self._actor

    def _trained(self) -> MasterOptimizer:
        if self._optimizer is None:
            raise RuntimeError("The engine is not prepared: call prepare() first.")
        return self._optimizer

    def _state(self, hf: bool) -> ModelState:
        settings = self._settings
        model = self._policy("actor").model
        return ModelState.copy_of(
            model, self._trained(), settings.model_path, settings.chat_template, hf
        )

    def _load(self, path: Path, weights_only: bool) -> None:
        load_state(self._policy("actor").model, self._trained(), path / "actor", weights_only)
