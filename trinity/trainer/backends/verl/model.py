"""`VerlModel`: one model in an engine of veRL, with its step count and learning rate."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel
from verl.workers.engine import EngineRegistry

from trinity.algorithm.aggregate import LossScope
from trinity.common.models.loading import override_inplace, resolve_dtype
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.updates import Share
from trinity.trainer.backends.verl.configs import VerlConfigs, configs_of
from trinity.trainer.backends.verl.loss import (
    Collected,
    GradientLoss,
    MicroBatchHook,
    ObjectiveLoss,
)
from trinity.trainer.backends.verl.rows import Way, tensordict_of
from trinity.trainer.backends.verl.settings import VerlEngineSettings
from trinity.trainer.backends.verl.sources import folder_of, make_value_config, seeded
from trinity.trainer.batch import TrainBatch
from trinity.trainer.engine import ModelRole
from trinity.trainer.loss import BatchObjective


class VerlModel:
    """The policy, its reference or the critic, on all ranks together.

    Every method is called on all ranks at once, each with its own rows.
    """

    def __init__(self, role: ModelRole, settings: VerlEngineSettings) -> None:
        self.role = role
        self.num_steps = 0
        self._settings = settings
        self.source = settings.path_of(role)
        self._optimizer = settings.optimizer_of(role)
        with ExitStack() as made:
            folder, self.is_random = made.enter_context(folder_of(role, settings))
            self._configs = configs_of(role, settings, folder)
            self.engine = self._engine(self._configs)
            # Megatron reads names from it whenever weights go out.
            self._folder = made.pop_all() if settings.is_megatron else ExitStack()
        self.plain = self._plain()
        """The bare model on no device: its config, its class, and names of parameters."""
        self.dtype = resolve_dtype(settings.dtype, torch.bfloat16)

    def close(self) -> None:
        """Remove a folder that was made for the model."""
        self._folder.close()

    @property
    def module(self) -> Any:
        """The sharded model."""
        return self.engine.module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What steps this rank's part of the weights."""
        found: torch.optim.Optimizer = self.engine.optimizer
        return found

    def outputs(self, batch: TrainBatch, rows: Sequence[int], entropy: bool) -> dict[str, Tensor]:
        """``logprob`` (and ``entropy``) or ``values`` of ``rows``, [B, T], without gradient."""
        hook = Collected(batch)
        rule = self._settings.rule(self.role, with_gradient=False)
        with self.engine.eval_mode():
            self.engine.infer_batch(self._data(batch, rows, rule, entropy), hook)
        if isinstance(self.module, FSDPModule):
            self.module.reshard()
        return hook.outputs

    def backward(
        self, batch: TrainBatch, rows: Sequence[int], objective: BatchObjective, scope: LossScope
    ) -> Share:
        """Add this rank's part of the gradient of an objective whose shares add up."""
        hook = ObjectiveLoss(batch, objective, scope, self.engine.get_data_parallel_size())
        self._train(batch, rows, hook, objective.needs_entropy)
        return hook.share

    def backward_from(
        self, batch: TrainBatch, rows: Sequence[int], gradient: Mapping[str, Tensor]
    ) -> None:
        """Add the gradient that follows from the one at the outputs ([B, T])."""
        hook = GradientLoss(batch, gradient, self.engine.get_data_parallel_size())
        self._train(batch, rows, hook, "entropy" in gradient)

    def step(self) -> dict[str, float]:
        """Clip, update, drop the gradient. A gradient that is not finite changes nothing."""
        lr = self._optimizer.lr * self._optimizer.schedule.factor(self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = self._update()
        self.num_steps += 1
        metrics = {"grad_norm": norm, "lr": lr}
        if not torch.isfinite(torch.tensor(norm)):
            metrics["skipped_updates"] = 1.0
        return metrics

    def _update(self) -> float:
        """Clip and update; the norm of the gradient."""
        with self.engine.train_mode():
            norm = float(self.engine.optimizer_step())
        self.engine.lr_scheduler_step()
        return norm

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights by Hugging Face name, each once, in the dtype they are computed with.

        Megatron gives experts one by one, by names that transformers knows in files alone.
        """
        once = {name for name, _ in self.plain.named_parameters()}
        repeated = self.plain.state_dict().keys() - once
        weights, _ = self.engine.get_per_tensor_param()
        for name, weight in weights:
            if name not in repeated:
                yield name, weight.detach().to(self.dtype)

    def _engine(self, configs: VerlConfigs) -> Any:
        override_inplace(configs.model.hf_config, self._settings.config_overrides)
        is_critic = self.role == "critic"
        if is_critic:
            make_value_config(configs.model.hf_config)
        engine = EngineRegistry.new(
            "value_model" if is_critic else "language_model",
            configs.engine.strategy,
            model_config=configs.model,
            engine_config=configs.engine,
            optimizer_config=configs.optimizer,
            checkpoint_config=configs.checkpoint,
        )
        with seeded(self._settings.seed):
            engine.initialize()
        return engine

    def _is_fused(self) -> bool:
        return bool(self._configs.model.use_fused_kernels)

    def _plain(self) -> PreTrainedModel:
        kind = AutoModelForTokenClassification if self.role == "critic" else AutoModelForCausalLM
        with torch.device("meta"):
            model: PreTrainedModel = kind.from_config(
                self._configs.model.hf_config, trust_remote_code=self._settings.trust_remote_code
            )
        return model

    def _train(
        self, batch: TrainBatch, rows: Sequence[int], hook: MicroBatchHook, entropy: bool
    ) -> None:
        rule = self._settings.rule(self.role, with_gradient=True)
        data = self._data(batch, rows, rule, entropy)
        with self.engine.train_mode(zero_grad_on_exit=False):
            self.engine.forward_backward_batch(data, hook, forward_only=False)

    def _data(
        self, batch: TrainBatch, rows: Sequence[int], rule: MicroBatchRule, entropy: bool
    ) -> Any:
        batch.require_tokens_below(self._configs.model.hf_config.get_text_config().vocab_size)
        way = Way(
            rule,
            self._settings.temperature,
            self._settings.sequence_shares,
            packs=self._configs.model.use_remove_padding,
            fused=self._is_fused(),
            entropy=entropy,
        )
        return tensordict_of(batch, rows, way)
