"""The models of an engine: loaded, cut over the ranks, with masters and optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx.experimental import _config as symbolic_shapes
from transformers import PreTrainedModel

from trinity.common.models.adapters import add_adapter_inplace
from trinity.common.models.lean import make_lean_inplace
from trinity.common.models.loading import cast_parameters, load_causal_lm, resolve_dtype
from trinity.common.models.routes import Routers
from trinity.trainer.backends.torch.critic import Critic, load_value_model
from trinity.trainer.backends.torch.layers import join_layers_inplace
from trinity.trainer.backends.torch.optimizer import MasterOptimizer, OptimizerSettings
from trinity.trainer.backends.torch.packed_model import PackedModel
from trinity.trainer.backends.torch.policy import Policy
from trinity.trainer.backends.torch.settings import TorchEngineSettings
from trinity.trainer.backends.torch.sharding import Ranks, ShardedWeights, layers_of, shard
from trinity.trainer.backends.torch.weights import Weights


@dataclass
class TrainedModel:
    """A model with its optimizer.

    Args:
        packed: The model.
        optimizer: Holds its weights' masters.
        source: Folder or name that it, and its tokenizer, came from.
        is_random: Its weights were made up.
    """

    packed: PackedModel
    optimizer: MasterOptimizer
    source: str
    is_random: bool = False


class Placement:
    """How models are put to work in this process: device, dtype, ranks."""

    def __init__(self, settings: TorchEngineSettings, ranks: Ranks | None) -> None:
        self._settings = settings
        self._ranks = ranks
        self._dtype = resolve_dtype(settings.dtype, torch.bfloat16)

    def actor(self) -> TrainedModel:
        """The policy that is trained."""
        settings = self._settings
        model, is_random = self._causal_lm()
        if settings.adapter is not None:
            add_adapter_inplace(model, settings.adapter)
        packed = Policy(
            model, settings.temperature, settings.shares_prefixes, settings.scores_entropy
        )
        optimizer = self._trained(
            packed,
            settings.optimizer,
            checkpointing=settings.gradient_checkpointing,
            param_offload=settings.param_offload,
            optimizer_offload=settings.optimizer_offload,
        )
        if settings.replays_routes:
            packed.routers = Routers(model)
        return TrainedModel(packed, optimizer, settings.model_path, is_random)

    def reference(self) -> PackedModel:
        """A frozen copy of the policy as it was at first."""
        settings = self._settings
        model, _ = self._causal_lm()
        packed = Policy(model.requires_grad_(False), settings.temperature, settings.shares_prefixes)
        if self._ranks is None:
            cast_parameters(model, self._dtype)
            self._to_device(model, settings.reference_offload)
        else:
            self._spread(packed, self._ranks, settings.reference_offload)
        return packed

    def critic(self) -> TrainedModel:
        """The value model that is trained."""
        settings, critic = self._settings, self._settings.critic
        assert critic is not None, "no critic in the settings"
        model = load_value_model(
            critic.model_path,
            settings.seed,
            trust_remote_code=settings.trust_remote_code,
            config_overrides=settings.config_overrides,
        )
        packed = Critic(model, settings.shares_prefixes)
        optimizer = self._trained(
            packed,
            critic.optimizer,
            checkpointing=critic.gradient_checkpointing,
            param_offload=critic.param_offload,
            optimizer_offload=critic.optimizer_offload,
        )
        return TrainedModel(packed, optimizer, critic.model_path)

    @contextmanager
    def at_work(self, packed: PackedModel, is_offloaded: bool) -> Iterator[PackedModel]:
        """The model on its device; afterwards off it again, if it is offloaded."""
        moves = is_offloaded and self._ranks is None and self._settings.device != "cpu"
        if moves:
            _move(packed.model, self._settings.device)
        try:
            yield packed
        finally:
            packed.rest()
            if moves:
                _move(packed.model, "cpu")

    def _causal_lm(self) -> tuple[PreTrainedModel, bool]:
        settings = self._settings
        return load_causal_lm(
            settings.model_path,
            torch.float32,
            settings.seed,
            trust_remote_code=settings.trust_remote_code,
            config_overrides=settings.config_overrides,
        )

    def _trained(
        self,
        packed: PackedModel,
        optimizer: OptimizerSettings,
        *,
        checkpointing: bool,
        param_offload: bool,
        optimizer_offload: bool,
    ) -> MasterOptimizer:
        model = packed.model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self._settings.compiles_layers:
            compile_layers_inplace(model)
        elif self._settings.device == "cpu":
            make_lean_inplace(model)
            join_layers_inplace(model)
        weights: Weights
        if self._ranks is None:
            _move(model, self._settings.device)  # first: masters are made where the model is
            weights = Weights(model, self._dtype, "cpu" if optimizer_offload else None)
            if param_offload:
                _move(model, "cpu")
        else:
            self._spread(packed, self._ranks, param_offload)
            weights = ShardedWeights(model, self._dtype, self._ranks, optimizer_offload)
        return MasterOptimizer(weights, optimizer)

    def _spread(self, packed: PackedModel, ranks: Ranks, is_offloaded: bool) -> None:
        once = self._settings.gathers_once
        packed.join(ranks, shard(packed.backbone, self._dtype, ranks, is_offloaded, once))

    def _to_device(self, model: PreTrainedModel, is_offloaded: bool) -> None:
        if not is_offloaded:
            _move(model, self._settings.device)


def _move(model: nn.Module, device: str) -> None:
    model.to(device)


def compile_layers_inplace(model: PreTrainedModel) -> None:
    """Compile each layer, for packed rows of any sizes."""
    from torch._inductor import config as inductor  # takes a second, and few compile

    symbolic_shapes.use_duck_shape = False  # sizes that are equal once need not be so again
    if hasattr(inductor.triton, "mix_order_reduction_non_strict_mode"):  # from torch 2.10 on
        # else a pass of few tokens has sums fused otherwise, and is compiled while all wait
        inductor.triton.mix_order_reduction_non_strict_mode = True
    for layer in layers_of(model):
        # Not the module: the hooks that FSDP adds to it are no part of what is compiled.
        layer.forward = torch.compile(layer.forward, dynamic=True)
