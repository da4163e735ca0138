"""RunPlan -> the trainer: its engine, what it reads, and how it updates."""

from trinity.algorithm import ADVANTAGE_FN, ALGORITHM_TYPE, KL_FN, SAMPLE_STRATEGY
from trinity.algorithm.advantage_fn.base import AdvantageFn
from trinity.algorithm.rollout_correction import RolloutCorrection
from trinity.common.config import Config
from trinity.common.config.training import BatchLimit, PartSettings, training_settings
from trinity.common.constants import SyncMethod
from trinity.launcher.buffers import Buffers
from trinity.launcher.job import JobCheckpoints
from trinity.launcher.plan import RunPlan, rope_overrides
from trinity.launcher.reporter import Reporter
from trinity.synchronizer.board import Board
from trinity.synchronizer.channel import CheckpointChannel, MemoryChannel, WeightChannel
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.schedule import Schedule
from trinity.trainer.backends.torch.settings import CriticSettings, TorchEngineSettings
from trinity.trainer.engine import TrainEngine
from trinity.trainer.loss import Objective
from trinity.trainer.preparation import Preparation
from trinity.trainer.trainer import ExperienceSource, Trainer, TrainerSettings
from trinity.trainer.update import Updater
from trinity.trainer.value_loss import ValueObjective
from trinity.utils import actor
from trinity.utils.log import get_logger


def build(
    plan: RunPlan,
    board: Board,
    buffers: Buffers,
    checkpoints: JobCheckpoints,
    reporter: Reporter,
    total_steps: int | None,
) -> Trainer:
    """The trainer of a plan; its engine's process starts, but loads nothing yet."""
    config = plan.config
    settings = config.trainer
    objective = _objective(config)
    engine = _engine(plan, total_steps)
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
            publishes_weights=_channel(plan) is not None,
        ),
        report=reporter.report,
        report_rows=reporter.rows,
        logger=get_logger(settings.name),
    )


def kill_engine(trainer: Trainer | None) -> None:
    """End the processes of a trainer's engine, whatever state they are in."""
    if trainer is not None:
        actor.kill(trainer.engine)


def _engine(plan: RunPlan, total_steps: int | None) -> TrainEngine:
    engine: TrainEngine = actor.spawn(
        TorchTrainEngine,
        _engine_settings(plan, total_steps),
        _channel(plan),
        name=plan.config.trainer.name,
        namespace=plan.namespace,
        num_gpus=plan.gpus.trainer,
        env_vars=plan.compute_env,
    )
    return engine


def _engine_settings(plan: RunPlan, total_steps: int | None) -> TorchEngineSettings:
    config = plan.config
    trainer, model = config.trainer, config.model
    parts = training_settings(config)
    part = parts.actor
    return TorchEngineSettings(
        model_path=model.model_path,
        dtype=trainer.dtype,
        seed=config.seed,
        temperature=model.temperature,
        optimizer=_optimizer(part, _num_updates(config, total_steps)),
        micro_batches=_rule(part.train),
        forward_micro_batches=_rule(part.forward),
        reference_micro_batches=_rule(parts.reference.forward),
        shares_prefixes=trainer.enable_shared_prefix,
        gradient_checkpointing=part.gradient_checkpointing,
        param_offload=part.param_offload,
        reference_offload=parts.reference.param_offload,
        optimizer_offload=part.optimizer_offload,
        critic=_critic(plan, total_steps),
        device=plan.device,
        trust_remote_code=trainer.trust_remote_code,
        config_overrides=rope_overrides(model),
        chat_template=model.custom_chat_template,
        num_threads=plan.cores,
        log_name=trainer.name,
    )


def _rule(limit: BatchLimit) -> MicroBatchRule:
    return MicroBatchRule(limit.max_tokens, limit.max_rows)


def _critic(plan: RunPlan, total_steps: int | None) -> CriticSettings | None:
    """The value model of an algorithm that reads values; None for the others."""
    config = plan.config
    if not _reads_values(config):
        return None
    part = training_settings(config).critic
    return CriticSettings(
        config.model.critic_model_path or config.model.model_path,
        optimizer=_optimizer(part, _num_updates(config, total_steps)),
        micro_batches=_rule(part.train),
        forward_micro_batches=_rule(part.forward),
        gradient_checkpointing=part.gradient_checkpointing,
        param_offload=part.param_offload,
        optimizer_offload=part.optimizer_offload,
    )


def _reads_values(config: Config) -> bool:
    advantage = trainer_advantage(config)
    return advantage is not None and "values" in advantage.requires


def _num_updates(config: Config, total_steps: int | None) -> int | None:
    """Optimizer steps of the run: one for each epoch over the rows of a training step."""
    return None if total_steps is None else total_steps * config.trainer.ppo_epochs


def _optimizer(part: PartSettings, num_updates: int | None) -> OptimizerSettings:
    given = part.optimizer
    return OptimizerSettings(
        lr=given.lr,
        betas=given.betas,
        weight_decay=given.weight_decay,
        clip_grad=part.grad_clip,
        schedule=Schedule(
            given.lr_scheduler_type.value,
            warmup_steps=given.lr_warmup_steps,
            warmup_ratio=given.lr_warmup_steps_ratio,
            min_ratio=given.min_lr_ratio,
            total_steps=num_updates,
        ),
    )


def _channel(plan: RunPlan) -> WeightChannel | None:
    """What carries weights to the explorer; None if no explorer takes them."""
    config = plan.config
    algorithm = ALGORITHM_TYPE.get(config.algorithm.algorithm_type)
    if not config.mode.pairs and algorithm.schema != "experience":
        return None
    if config.synchronizer.sync_method is SyncMethod.MEMORY:
        return MemoryChannel()
    return CheckpointChannel(plan.job.weights)


def _objective(config: Config) -> Objective:
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
        has_critic=_reads_values(config),
        recomputes_old_logprobs=not algorithm.bypass_old_logprobs,
        needs_entropy="entropy" in requires,
        correction=RolloutCorrection(**correction).of_batch if correction else None,
    )


def trainer_advantage(config: Config) -> AdvantageFn | None:
    """The advantage function, if it is one that the trainer computes."""
    name = config.algorithm.advantage_fn
    if not name or name == "none":
        return None
    advantage_class = ADVANTAGE_FN.get(name)
    if not advantage_class.compute_in_trainer():
        return None
    found = advantage_class(**(config.algorithm.advantage_fn_args or {}))
    assert isinstance(found, AdvantageFn)
    return found


def _updater(config: Config, engine: TrainEngine, objective: Objective) -> Updater:
    settings = training_settings(config)
    return Updater(
        engine,
        objective,
        ValueObjective(settings.critic_cliprange_value) if _reads_values(config) else None,
        epochs=settings.epochs,
        shuffle=settings.shuffle,
        critic_warmup=config.trainer.critic_warmup,
        seed=config.seed,
    )
