"""RunPlan -> the trainer: what it reads, and how it updates."""

from functools import partial

from trinity.algorithm import ALGORITHM_TYPE, KL_FN, SAMPLE_STRATEGY
from trinity.algorithm.rollout_correction import RolloutCorrection
from trinity.checkpoint import layout
from trinity.common.config import Config
from trinity.common.config.gpus import ranks_per_row
from trinity.common.config.shape import find_shape
from trinity.common.config.training import training_settings
from trinity.common.constants import SyncMethod, TrainerType
from trinity.launcher import build_train_engine
from trinity.launcher.buffers import Buffers
from trinity.launcher.build_train_engine import (
    build_engine,
    reads,
    trainer_advantage,
)
from trinity.launcher.job import JobCheckpoints
from trinity.launcher.plan import RunPlan
from trinity.launcher.reporter import Reporter
from trinity.synchronizer.board import Board
from trinity.synchronizer.channel import CheckpointChannel, MemoryChannel, WeightChannel
from trinity.synchronizer.ipc import IPCChannel
from trinity.synchronizer.nccl import NCCLChannel
from trinity.trainer.cost import StepCost
from trinity.trainer.engine import TrainEngine
from trinity.trainer.loss import Objective
from trinity.trainer.preparation import Preparation
from trinity.trainer.trainer import ExperienceSource, Trainer, TrainerSettings
from trinity.trainer.update import Updater
from trinity.trainer.value_loss import ValueObjective
from trinity.utils.log import get_logger
from trinity.utils.progress import Show

_PEER_TIMEOUT_S = 120.0
"""Seconds that one end of a transfer waits for the other to answer."""


def build(
    plan: RunPlan,
    board: Board,
    buffers: Buffers,
    checkpoints: JobCheckpoints,
    reporter: Reporter,
    total_steps: int | None,
    show: Show,
) -> Trainer:
    """The trainer of a plan; its engine's process starts, but loads nothing yet.

    ``show`` gets what it waits for where no explorer of this command tells how far it is.
    """
    config = plan.config
    settings = config.trainer
    objective = objective_of(config)
    takes_weights = _has_explorer(config)
    channel = _channel(plan) if takes_weights else None
    engine = build_engine(plan, channel, _num_updates(config, total_steps))
    return Trainer(
        engine=engine,
        source=_source(config, buffers),
        preparation=_preparation(config, engine, objective),
        updater=_updater(config, engine, objective),
        board=board,
        schedule=plan.schedule,
        checkpoints=checkpoints,
        settings=TrainerSettings(
            total_steps=settings.total_steps,
            save_interval=settings.save_interval,
            save_hf=settings.save_hf_checkpoint.value,
            on_save_error=settings.on_save_error.value,
            enable_preview=settings.enable_preview,
            publishes_weights=takes_weights,
        ),
        cost=_cost(plan),
        report=reporter.report,
        report_rows=reporter.rows,
        show=show if takes_weights and not config.mode.explores else None,
        logger=get_logger(settings.name),
    )


def kill_engine(trainer: Trainer | None) -> None:
    """End the processes of a trainer's engine, whatever state they are in."""
    if trainer is not None:
        build_train_engine.kill_engine(trainer.engine)


def _cost(plan: RunPlan) -> StepCost:
    """How the cost of a training step is told; a model whose size is a guess is left out."""
    config = plan.config
    shape, critic = (
        found if found is not None and not found.is_guess else None
        for found in map(
            find_shape,
            (config.model.model_path, config.model.critic_model_path or config.model.model_path),
        )
    )
    return StepCost(
        num_parts=plan.num_ranks // ranks_per_row(config.trainer),
        actor=shape,
        critic=critic,
        epochs=training_settings(config).epochs,
    )


def _num_updates(config: Config, total_steps: int | None) -> int | None:
    """Optimizer steps of the run: one for each mini-batch of each epoch over a training step."""
    if total_steps is None:
        return None
    rows = config.buffer.train_batch_size
    mini_batches = -(-rows // (config.trainer.mini_batch_size or max(rows, 1)))
    return total_steps * config.trainer.ppo_epochs * max(mini_batches, 1)


def _has_explorer(config: Config) -> bool:
    """Whether an explorer takes the weights, in this run or in another command."""
    algorithm = ALGORITHM_TYPE.get(config.algorithm.algorithm_type)
    return config.mode.pairs or algorithm.schema == "experience"


def _channel(plan: RunPlan) -> WeightChannel | None:
    """What carries weights to the explorer; None where they stay at a service."""
    config = plan.config
    if config.trainer.trainer_type is TrainerType.TINKER:
        return None
    sync = config.synchronizer
    if plan.is_colocated:
        return IPCChannel()
    if sync.sync_method is SyncMethod.NCCL:
        is_ours = config.trainer.trainer_type is TrainerType.TORCH
        return NCCLChannel(
            config.explorer.rollout_model.engine_num,
            is_live=is_ours and plan.num_ranks == 1,
            group=sync.group_name,
            timeout_s=min(sync.sync_timeout, _PEER_TIMEOUT_S),
            copies=not is_ours,
            sends_delta=sync.delta,
            log_name=config.trainer.name,
        )
    if sync.sync_method is SyncMethod.MEMORY:
        return MemoryChannel()
    note = partial(layout.write_latest, plan.job.path, name=layout.LATEST_WEIGHTS)
    return CheckpointChannel(plan.job.weights, on_sent=note)


def objective_of(config: Config) -> Objective:
    """What a run's actor minimises."""
    algorithm = config.algorithm
    return Objective.from_names(
        policy_loss_fn=algorithm.policy_loss_fn or "ppo",
        policy_loss_fn_args=algorithm.policy_loss_fn_args,
        kl_loss_fn=algorithm.kl_loss_fn or "none",
        kl_loss_fn_args=algorithm.kl_loss_fn_args,
        entropy_loss_fn=algorithm.entropy_loss_fn or "none",
        entropy_loss_fn_args=algorithm.entropy_loss_fn_args,
        loss_agg_mode=algorithm.loss_agg_mode,
    )


def _source(config: Config, buffers: Buffers) -> ExperienceSource:
    strategy = SAMPLE_STRATEGY.get(config.algorithm.sample_strategy or "default")
    return strategy(
        buffers.reader,
        config.buffer.train_batch_size,
        buffers.auxiliary,
        **(config.algorithm.sample_strategy_args or {}),
    )


def _preparation(config: Config, engine: TrainEngine, objective: Objective) -> Preparation:
    algorithm = config.algorithm
    kl_name = algorithm.kl_penalty_fn or "none"
    penalty = KL_FN.get(kl_name)(**(algorithm.kl_penalty_fn_args or {}))
    has_penalty = kl_name != "none"
    advantage = trainer_advantage(config)
    requires = advantage.requires if advantage is not None else ()
    correction = algorithm.rollout_correction
    return Preparation(
        engine,
        advantage_fn=advantage,
        kl_penalty_fn=penalty if has_penalty else None,
        needs_reference=objective.needs_reference or has_penalty,
        has_critic=reads(config, "values"),
        recomputes_old_logprobs=not algorithm.bypass_old_logprobs,
        needs_entropy="entropy" in requires,
        correction=RolloutCorrection(**correction).of_batch if correction else None,
    )


def _updater(config: Config, engine: TrainEngine, objective: Objective) -> Updater:
    settings = training_settings(config)
    return Updater(
        engine,
        objective,
        ValueObjective(settings.critic_cliprange_value) if reads(config, "values") else None,
        epochs=settings.epochs,
        mini_batch_size=config.trainer.mini_batch_size,
        shuffle=settings.shuffle,
        critic_warmup=config.trainer.critic_warmup,
        seed=config.seed,
    )
