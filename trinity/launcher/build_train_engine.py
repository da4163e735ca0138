"""RunPlan -> the trainer's engine: one process, or one for each rank."""

from dataclasses import replace
from typing import TYPE_CHECKING

from trinity.algorithm import ADVANTAGE_FN
from trinity.algorithm.advantage_fn.base import AdvantageFn
from trinity.common.config import Config, MegatronConfig
from trinity.common.config.memory import is_compiled
from trinity.common.config.training import BatchLimit, PartSettings, training_settings
from trinity.common.config.verl.keys import for_verl
from trinity.common.constants import TrainerStrategy, TrainerType
from trinity.launcher.adapter import adapter_settings
from trinity.launcher.plan import RunPlan, rope_overrides
from trinity.launcher.tinker import tinker_service
from trinity.synchronizer.channel import WeightChannel
from trinity.trainer.backends.tinker import make_engine as make_tinker_engine
from trinity.trainer.backends.tinker.settings import TinkerTrainSettings
from trinity.trainer.backends.torch import make_engine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.schedule import Schedule
from trinity.trainer.backends.torch.settings import CriticSettings, TorchEngineSettings
from trinity.trainer.backends.verl.settings import MegatronSizes, VerlEngineSettings
from trinity.trainer.engine import TrainEngine
from trinity.utils import actor

if TYPE_CHECKING:  # these bring transformers' models, which take a second and a half to import
    from trinity.trainer.backends.torch.rank import TorchTrainRank
    from trinity.trainer.backends.torch.rank_group import RankGroup
    from trinity.trainer.backends.verl.rank import VerlTrainRank

_RANK_TIMEOUT_S = 1800.0


def build_engine(plan: RunPlan, channel: WeightChannel | None, updates: int | None) -> TrainEngine:
    """The engine of a plan; its processes start, but load nothing yet.

    Args:
        channel: Carries weights to the explorer; None if nobody takes them.
        updates: Optimizer steps of the run, if that is known.
    """
    if plan.config.trainer.trainer_type is TrainerType.TINKER:
        return _tinker_engine(plan, updates)
    settings = _settings(plan, updates)
    name = plan.config.trainer.name
    if plan.config.trainer.trainer_type is TrainerType.VERL:
        return _ranks(plan, _for_verl(plan.config, settings), channel, _verl_rank(plan.config))
    if plan.num_ranks > 1:
        from trinity.trainer.backends.torch.rank import TorchTrainRank

        return _ranks(plan, settings, channel, TorchTrainRank)
    engine: TrainEngine = actor.spawn(
        make_engine,
        settings,
        channel,
        name=name,
        namespace=plan.namespace,
        num_gpus=plan.gpus.trainer,
        env_vars=plan.env_on(0, 1),
    )
    return engine


def _tinker_engine(plan: RunPlan, updates: int | None) -> TrainEngine:
    """One process that asks the service; no weights pass through it."""
    config, given = plan.config, plan.config.model.tinker
    settings = TinkerTrainSettings(
        tinker_service(config),
        rank=given.rank,
        seed=given.seed,
        train_mlp=given.train_mlp,
        train_attn=given.train_attn,
        train_unembed=given.train_unembed,
        optimizer=_optimizer(training_settings(config).actor, updates),
    )
    engine: TrainEngine = actor.spawn(
        make_tinker_engine,
        settings,
        name=config.trainer.name,
        namespace=plan.namespace,
        env_vars=plan.compute_env,
    )
    return engine


def kill_engine(engine: TrainEngine) -> None:
    """End the processes of an engine, whatever state they are in."""
    processes = [engine] if actor.is_remote(engine) else getattr(engine, "ranks", [])
    for process in processes:
        actor.kill(process)


def _ranks(
    plan: RunPlan,
    settings: TorchEngineSettings,
    channel: WeightChannel | None,
    kind: type,
) -> "RankGroup":
    """One process for each rank; the first has the channel, and the trainer's own log.

    Where engines share the GPUs each rank has one, to the engine on its own GPU.
    """
    from trinity.trainer.backends.torch.rank_group import RankGroup
    from trinity.trainer.backends.torch.sharding import RankSettings

    world_size = plan.num_ranks
    threads = max(1, plan.cores // world_size)
    ranks: list[TorchTrainRank] = []
    for number in range(world_size):
        name = f"{settings.log_name}_rank_{number}" if number else settings.log_name
        rank = RankSettings(number, world_size, timeout_s=_RANK_TIMEOUT_S)
        ranks.append(
            actor.spawn(
                kind,
                replace(settings, num_threads=threads, log_name=name),
                channel if number == 0 or plan.is_colocated else None,
                rank,
                name=name,
                namespace=plan.namespace,
                num_gpus=1 if plan.gpus.trainer else 0,
                env_vars={**plan.env_on(number, 1), "OMP_NUM_THREADS": str(threads)},
            )
        )
    return RankGroup(ranks, settings)


def _settings(plan: RunPlan, updates: int | None) -> TorchEngineSettings:
    config = plan.config
    trainer, model = config.trainer, config.model
    parts = training_settings(config)
    part = parts.actor
    return TorchEngineSettings(
        model_path=model.model_path,
        dtype=trainer.dtype,
        seed=config.seed,
        temperature=model.temperature,
        scores_entropy=reads(config, "necs"),
        optimizer=_optimizer(part, updates),
        micro_batches=_rule(part.train),
        forward_micro_batches=_rule(part.forward),
        reference_micro_batches=_rule(parts.reference.forward),
        shares_prefixes=trainer.enable_shared_prefix,
        gradient_checkpointing=part.gradient_checkpointing,
        param_offload=part.param_offload,
        reference_offload=parts.reference.param_offload,
        optimizer_offload=part.optimizer_offload,
        critic=_critic(plan, updates),
        adapter=adapter_settings(config),
        sequence_parallel=trainer.ulysses_sequence_parallel_size,
        balances_ranks=trainer.balance_batch,
        save_strategy=trainer.save_strategy.value,
        device=plan.device,
        compiles_layers=plan.device == "cuda" and is_compiled(config),
        replays_routes=config.algorithm.enable_router_replay,
        trust_remote_code=trainer.trust_remote_code,
        config_overrides=rope_overrides(model),
        chat_template=model.custom_chat_template,
        num_threads=plan.cores,
        log_name=trainer.name,
    )


def _verl_rank(config: Config) -> "type[VerlTrainRank]":
    if config.trainer.trainer_strategy is TrainerStrategy.MEGATRON:
        from trinity.trainer.backends.verl.megatron_rank import MegatronTrainRank

        return MegatronTrainRank
    from trinity.trainer.backends.verl.rank import VerlTrainRank

    return VerlTrainRank


def _for_verl(config: Config, settings: TorchEngineSettings) -> VerlEngineSettings:
    trainer = config.trainer
    return VerlEngineSettings.of(
        replace(
            settings,
            param_offload=trainer.param_offload,
            optimizer_offload=trainer.optimizer_offload,
        ),
        strategy=trainer.trainer_strategy.value,
        megatron=_megatron_sizes(trainer.megatron),
        packs=trainer.use_remove_padding,
        offload_policy=trainer.offload_policy,
        verl=for_verl(trainer.trainer_config),
    )


def _megatron_sizes(given: MegatronConfig) -> MegatronSizes:
    return MegatronSizes(
        tensor=given.tensor_model_parallel_size,
        pipeline=given.pipeline_model_parallel_size,
        virtual_pipeline=given.virtual_pipeline_model_parallel_size,
        expert=given.expert_model_parallel_size,
        expert_tensor=given.expert_tensor_parallel_size,
        context=given.context_parallel_size,
        sequence_parallel=given.sequence_parallel,
    )


def _rule(limit: BatchLimit) -> MicroBatchRule:
    return MicroBatchRule(limit.max_tokens, limit.max_rows)


def _critic(plan: RunPlan, updates: int | None) -> CriticSettings | None:
    """The value model of an algorithm that reads values; None for the others."""
    config = plan.config
    if not reads(config, "values"):
        return None
    part = training_settings(config).critic
    return CriticSettings(
        config.model.critic_model_path or config.model.model_path,
        optimizer=_optimizer(part, updates),
        micro_batches=_rule(part.train),
        forward_micro_batches=_rule(part.forward),
        gradient_checkpointing=part.gradient_checkpointing,
        param_offload=part.param_offload,
        optimizer_offload=part.optimizer_offload,
    )


def _optimizer(part: PartSettings, updates: int | None) -> OptimizerSettings:
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
            total_steps=updates,
        ),
    )


def reads(config: Config, column: str) -> bool:
    """Whether the advantage is computed in the trainer from this column, such as ``values``."""
    advantage = trainer_advantage(config)
    return advantage is not None and column in advantage.requires


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
