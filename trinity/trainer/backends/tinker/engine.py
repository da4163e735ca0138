"""`TinkerTrainEngine`: an adapter that the Tinker service trains, by losses computed here.

A loss is a function of logprobs. The service gives those of a batch; the loss and its gradient at
them are computed here; and the service takes that gradient as weights of a sum of logprobs, whose
gradient at the adapter is then that of the loss. These are the two requests that the library's
``forward_backward_custom`` makes too; made one by one, rows without a gradient need no second one.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from trinity.algorithm.aggregate import LossScope
from trinity.checkpoint import atomic, layout
from trinity.common.models.protocol import WeightTicket
from trinity.engine.tinker.saved import SavedModel, ticket_of
from trinity.engine.tinker.service import TinkerService, sdk
from trinity.trainer.backends.tinker.rows import by_row, data_of, trained_rows
from trinity.trainer.backends.tinker.settings import TinkerTrainSettings
from trinity.trainer.backends.torch.state import write_files
from trinity.trainer.backends.torch.updates import Share, gradient_at_outputs, scope_of
from trinity.trainer.batch import TrainBatch
from trinity.trainer.engine import ModelRole, TrainedRole
from trinity.trainer.figures import figures_of_process
from trinity.trainer.loss import BatchObjective

if TYPE_CHECKING:
    from tinker import (
        APIFuture,
        ForwardBackwardOutput,
        OptimStepResponse,
        SamplingClient,
        TrainingClient,
    )
    from tinker.types import (
        SaveWeightsExternalResponse,
        SaveWeightsForSamplerResponse,
        SaveWeightsResponse,
    )

_LOSS: Literal["cross_entropy"] = "cross_entropy"  # the service's: sum of -weight * logprob
_EXPORTED_S = 24 * 3600  # that the service keeps an export, which is fetched at once
_PUBLISHED_S = 7 * 24 * 3600  # that the service keeps weights which were published to engines


class TinkerTrainEngine:
    """A `TrainEngine` whose model is at the service. See `trinity.trainer.engine`."""

    def __init__(self, settings: TinkerTrainSettings) -> None:
        self._settings = settings
        self._service = TinkerService(settings.service)
        self._client: TrainingClient | None = None
        self._reference: SamplingClient | None = None
        self._num_steps = 0
        self._num_saved = 0
        self._is_finite = True
        self._passes: list[APIFuture[ForwardBackwardOutput]] = []
        self._saving: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        await self._service.connect()
        given = self._settings
        self._client = await self._service.create(
            lambda client: client.create_lora_training_client(
                self._service.base_model,
                rank=given.rank,
                seed=given.seed,
                train_mlp=given.train_mlp,
                train_attn=given.train_attn,
                train_unembed=given.train_unembed,
            ),
            "the start of training",
        )

    async def forward(
        self, batch: TrainBatch, which: ModelRole = "actor", entropy: bool = False
    ) -> dict[str, Tensor]:
        if entropy or which == "critic":
            asked = "entropies" if entropy else "values"
            raise ValueError(f"The Tinker service gives logprobs of tokens, not {asked}.")
        _refuse_temperatures(batch)
        mask_BT = batch["action_mask"]
        rows = trained_rows(mask_BT)
        if not rows:
            return {"logprob": torch.zeros(mask_BT.shape)}
        if which == "ref":
            return {"logprob": by_row(batch, rows, await self._reference_logprobs(batch, rows))}
        data = data_of(batch, rows, torch.zeros(mask_BT.shape))
        found: ForwardBackwardOutput = await self._service.answer(
            self._trained().forward(data, _LOSS), "a forward pass"
        )
        values = [output["logprobs"].to_torch() for output in found.loss_fn_outputs]
        return {"logprob": by_row(batch, rows, values)}

    async def forward_backward(
        self,
        batch: TrainBatch,
        objective: BatchObjective,
        which: TrainedRole = "actor",
        scope: LossScope | None = None,
    ) -> dict[str, float]:
        outputs = await self.forward(batch, which, objective.needs_entropy)
        gradient, share = gradient_at_outputs(outputs, batch, objective, scope or scope_of(batch))
        weight_BT = -gradient["logprob"]
        self._is_finite = bool(weight_BT.isfinite().all())
        if self._is_finite:
            rows = trained_rows(weight_BT) or trained_rows(batch["action_mask"])[:1]
            data = data_of(batch, rows, weight_BT)
            self._passes.append(self._trained().forward_backward(data, _LOSS))
        return Share.total([share], objective.loss_name)

    async def optim_step(self, which: TrainedRole = "actor") -> dict[str, float]:
        """One step; a gradient that is not finite was not sent, and changes nothing.

        It is asked for while the pass before it may be under way: the service takes requests in
        their order, and does two that are there in one round.
        """
        given = self._settings.optimizer
        lr = given.lr * given.schedule.factor(self._num_steps)
        self._num_steps += 1  # also of one that is left out: the rate follows the trainer's steps
        if not self._is_finite:
            self._is_finite = True
            return {f"{which}/lr": lr, f"{which}/skipped_updates": 1.0}
        step = sdk().AdamParams(
            learning_rate=lr,
            beta1=given.betas[0],
            beta2=given.betas[1],
            eps=given.eps,
            weight_decay=given.weight_decay,
            grad_clip_norm=given.clip_grad or 0.0,
        )
        request = self._trained().optim_step(step)
        passes, self._passes = self._passes, []
        for under_way in passes:
            await self._service.answer(under_way, "a training pass")
        found: OptimStepResponse = await self._service.answer(request, "an optimizer step")
        metrics = {name.partition(":")[0]: value for name, value in (found.metrics or {}).items()}
        return {f"{which}/{name}": value for name, value in {**metrics, "lr": lr}.items()}

    async def send_weights(self, version: int) -> WeightTicket:
        """Keep the weights at the service to sample from; engines get their path."""
        request = self._for_sampler(f"version_{version}", _PUBLISHED_S)
        found: SaveWeightsForSamplerResponse = await self._service.answer(
            request, "a save of weights to sample from"
        )
        return ticket_of(version, found.path)

    async def save(
        self,
        path: str | Path,
        hf: bool = False,
        files: Mapping[str, str | bytes] | None = None,
        is_last: bool = False,
    ) -> None:
        """Begin to save: weights and optimizer at the service, their paths in the folder.

        With ``hf`` the adapter is fetched too, in PEFT's form.
        """
        await self.wait_saved()
        name = Path(path).name
        state = self._trained().save_state(name, overwrite=True)
        sampler = self._for_sampler(name, None)
        exported = None
        if hf:
            exported = self._trained().save_weights_external(
                f"{name}_{self._num_saved}", _EXPORTED_S
            )
        write = self._write(Path(path), state, sampler, exported, self._num_steps, files or {})
        self._saving = asyncio.create_task(write)

    async def wait_saved(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def load(self, path: str | Path, weights_only: bool = False) -> None:
        saved = SavedModel.read(Path(path) / layout.ACTOR)
        if trouble := saved.difference(self._service.base_model, self._settings.rank):
            raise ValueError(f"{path} is {trouble}.")
        self._client = await self._service.create(
            lambda client: (
                client.create_training_client_from_state(saved.state)
                if weights_only
                else client.create_training_client_from_state_with_optimizer(saved.state)
            ),
            "the load of a checkpoint",
        )
        self._num_steps = 0 if weights_only else saved.num_steps

    async def health(self) -> dict[str, float]:
        return {**figures_of_process(), "optimizer_steps": float(self._num_steps)}

    async def close(self) -> None:
        try:
            await self.wait_saved()
        finally:
            await self._service.close()

    async def _reference_logprobs(self, batch: TrainBatch, rows: list[int]) -> list[Tensor]:
        """Of the model as it was, without the adapter: a sampler of it scores responses."""
        if self._reference is None:
            self._reference = await self._service.sampler()
        tokens, lengths = batch.row_tokens(), batch.response_lengths.tolist()
        score = partial(self._service.score, self._reference)
        found = await asyncio.gather(*[score(tokens[row].tolist(), lengths[row]) for row in rows])
        return [torch.tensor(values) for values in found]

    def _for_sampler(
        self, name: str, kept_s: int | None
    ) -> "APIFuture[SaveWeightsForSamplerResponse]":
        self._num_saved += 1  # a name can't be taken twice
        return self._trained().save_weights_for_sampler(f"{name}_{self._num_saved}", kept_s)

    async def _write(
        self,
        path: Path,
        state: "APIFuture[SaveWeightsResponse]",
        sampler: "APIFuture[SaveWeightsForSamplerResponse]",
        exported: "APIFuture[SaveWeightsExternalResponse] | None",
        num_steps: int,
        files: Mapping[str, str | bytes],
    ) -> None:
        saved = SavedModel(
            base_model=self._service.base_model,
            rank=self._settings.rank,
            state=(await self._service.answer(state, "a save of the checkpoint")).path,
            sampler=(await self._service.answer(sampler, "a save of the checkpoint")).path,
            num_steps=num_steps,
        )
        with atomic.writing_folder(path) as aside:
            saved.write(aside / layout.ACTOR)
            write_files(aside, files)
            if exported is not None:
                found: SaveWeightsExternalResponse = await self._service.answer(
                    exported, "an export of the adapter"
                )
                folder = aside / layout.ACTOR / layout.LORA_ADAPTER
                await self._service.download(found.path, folder)

    def _trained(self) -> "TrainingClient":
        if self._client is None:
            raise RuntimeError("The engine is not prepared: call prepare() first.")
        return self._client


def _refuse_temperatures(batch: TrainBatch) -> None:
    """Rows of another temperature than 1; greedy ones are trained on at 1, as everywhere."""
    if "temperature" not in batch:
        return
    other = [heat for heat in batch["temperature"].tolist() if heat not in (0.0, 1.0)]
    if other:
        raise ValueError(
            f"Experiences were sampled at temperature {other[0]:g}, but the Tinker service trains "
            "on logprobs at temperature 1. Set it to 1 where they are sampled."
        )
