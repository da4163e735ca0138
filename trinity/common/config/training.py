"""What the trainer's models are trained with, once veRL's keys and ours are brought together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trinity.common.config.algorithm import OptimizerConfig
from trinity.common.config.root import Config
from trinity.common.config.verl.keys import ACTOR, REF, ROLLOUT, leaves

_CRITIC_LR = 1e-5
_CRITIC_CLIP = 0.5
_CRITIC_OPTIMIZER = (
    "lr",
    "lr_warmup_steps",
    "lr_warmup_steps_ratio",
    "min_lr_ratio",
    "weight_decay",
    "betas",
)


@dataclass(frozen=True)
class BatchLimit:
    """How large one pass through a model may be on one GPU: by tokens, or by rows.

    Exactly one of the two is set.
    """

    max_tokens: int | None = None
    max_rows: int | None = None


@dataclass(frozen=True)
class PartSettings:
    """How one model of the trainer works.

    Args:
        train: Limit of a micro-batch with gradients.
        forward: Limit of a pass without.
        optimizer: Its own; the reference model's is meaningless.
        grad_clip: Largest gradient norm.
        gradient_checkpointing: Compute activations twice instead of keeping them.
        param_offload: Keep weights in CPU memory while not used.
        optimizer_offload: Keep the optimizer's state in CPU memory while not used.
    """

    train: BatchLimit
    forward: BatchLimit
    optimizer: OptimizerConfig
    grad_clip: float
    gradient_checkpointing: bool
    param_offload: bool
    optimizer_offload: bool


@dataclass(frozen=True)
class TrainingSettings:
    """All models of the trainer, and how often a batch is gone through.

    Args:
        actor: The model that is trained.
        critic: The value model; used by algorithms with one.
        reference: The frozen model; its ``train`` and ``optimizer`` mean nothing.
        epochs: Passes over each batch.
        shuffle: Whether rows are shuffled before each pass.
        critic_cliprange_value: How far a value may move before its loss is clipped.
    """

    actor: PartSettings
    critic: PartSettings
    reference: PartSettings
    epochs: int
    shuffle: bool
    critic_cliprange_value: float


def training_settings(config: Config) -> TrainingSettings:
    """Settings of the trainer's models. ``config`` must be filled in by `derive`."""
    verl = leaves(config.trainer.trainer_config)
    verl = {key: value for key, value in verl.items() if value is not None}
    actor = _actor(config, verl)
    return TrainingSettings(
        actor=actor,
        critic=_critic(config, verl, actor),
        reference=_reference(verl, actor),
        epochs=config.trainer.ppo_epochs,
        shuffle=bool(verl.get(f"{ACTOR}.shuffle", False)),
        critic_cliprange_value=float(verl.get("critic.cliprange_value", _CRITIC_CLIP)),
    )


def _actor(config: Config, verl: dict[str, Any]) -> PartSettings:
    trainer = config.trainer
    train = _limit(
        trainer.use_dynamic_bsz,
        trainer.max_token_len_per_gpu,
        verl.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    )
    return PartSettings(
        train=train,
        forward=_forward(verl, ROLLOUT, train),
        optimizer=config.algorithm.optimizer,
        grad_clip=trainer.grad_clip,
        gradient_checkpointing=trainer.enable_gradient_checkpointing,
        param_offload=trainer.param_offload or trainer.offload_policy,
        optimizer_offload=trainer.optimizer_offload or trainer.offload_policy,
    )


def _critic(config: Config, verl: dict[str, Any], actor: PartSettings) -> PartSettings:
    dynamic = verl.get("critic.use_dynamic_bsz", config.trainer.use_dynamic_bsz)
    tokens = verl.get("critic.ppo_max_token_len_per_gpu", config.trainer.max_token_len_per_gpu)
    train = _limit(dynamic, tokens, verl.get("critic.ppo_micro_batch_size_per_gpu"))
    forward = _limit(
        train.max_tokens is not None,
        verl.get("critic.forward_max_token_len_per_gpu", train.max_tokens),
        verl.get("critic.forward_micro_batch_size_per_gpu", train.max_rows),
    )
    checkpointing = "critic.model.enable_gradient_checkpointing"
    offload = "critic.model.fsdp_config"
    return PartSettings(
        train=train,
        forward=forward,
        optimizer=_critic_optimizer(verl),
        grad_clip=float(verl.get("critic.grad_clip", actor.grad_clip)),
        gradient_checkpointing=bool(verl.get(checkpointing, actor.gradient_checkpointing)),
        param_offload=bool(verl.get(f"{offload}.param_offload", False)),
        optimizer_offload=bool(verl.get(f"{offload}.optimizer_offload", False)),
    )


def _critic_optimizer(verl: dict[str, Any]) -> OptimizerConfig:
    given = {
        name: verl[f"critic.optim.{name}"]
        for name in _CRITIC_OPTIMIZER
        if f"critic.optim.{name}" in verl
    }
    for name in ("warmup_style", "lr_scheduler_type"):
        if f"critic.optim.{name}" in verl:
            given["lr_scheduler_type"] = verl[f"critic.optim.{name}"]
    return OptimizerConfig.model_validate({"lr": _CRITIC_LR, **given})


def _reference(verl: dict[str, Any], actor: PartSettings) -> PartSettings:
    return PartSettings(
        train=actor.train,
        forward=_forward(verl, REF, actor.train),
        optimizer=actor.optimizer,
        grad_clip=actor.grad_clip,
        gradient_checkpointing=False,
        param_offload=bool(verl.get(f"{REF}.fsdp_config.param_offload", False)),
        optimizer_offload=False,
    )


def _forward(verl: dict[str, Any], part: str, train: BatchLimit) -> BatchLimit:
    return _limit(
        verl.get(f"{part}.log_prob_use_dynamic_bsz", train.max_tokens is not None),
        verl.get(f"{part}.log_prob_max_token_len_per_gpu", train.max_tokens),
        verl.get(f"{part}.log_prob_micro_batch_size_per_gpu", train.max_rows),
    )


def _limit(by_tokens: bool, tokens: int | None, rows: int | None) -> BatchLimit:
    """By tokens, or by rows; one row at a time where neither number is known."""
    if by_tokens and tokens is not None:
        return BatchLimit(max_tokens=tokens)
    return BatchLimit(max_rows=rows or 1)
