"""veRL's launch keys -> ours, by the tables of `docs/align_with_verl.md`.

Keys that need more than a new name are handled in `launch`; here they have a `rule`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Import:
    """Where one key of veRL goes.

    Args:
        ours: Our dotted key; empty where there is none.
        why: Why there is none, or what to know about it.
        values: veRL's value -> ours, where they are spelled differently.
        rule: Whether `launch` works it out together with other keys.
        also: A second key of ours that gets the same value.
    """

    ours: str = ""
    why: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    rule: bool = False
    also: str = ""


KL_NAMES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "k3": "low_var_kl"}
KL_NAMES |= {"low_var_kl": "low_var_kl", "abs": "abs"}
ADVANTAGES = {
    "gae": ("ppo", "ppo"),
    "grpo": ("grpo", "grpo"),
    "rloo": ("rloo", "rloo"),
    "reinforce_plus_plus": ("reinforceplusplus", "reinforceplusplus"),
    "remax": ("reinforceplusplus", "remax"),
}
"""veRL's estimator -> algorithm_type and advantage_fn."""

_LOSSES = {"vanilla": "ppo", "gspo": "gspo", "gpg": "opmd"}
_OURS_DOES = "done anyway"
_ROLLOUT = "explorer.rollout_model"

IMPORTS: dict[str, Import] = {
    "algorithm.adv_estimator": Import("algorithm.advantage_fn", rule=True),
    "algorithm.gamma": Import("algorithm.advantage_fn_args.gamma", rule=True),
    "algorithm.lam": Import("algorithm.advantage_fn_args.lam", rule=True),
    "algorithm.use_kl_in_reward": Import("algorithm.kl_penalty_fn", rule=True),
    "algorithm.kl_penalty": Import("algorithm.kl_penalty_fn", rule=True),
    "algorithm.kl_ctrl.kl_coef": Import("algorithm.kl_penalty_fn_args.kl_coef"),
    "algorithm.kl_ctrl.type": Import(
        "algorithm.kl_penalty_fn_args.adaptive", values={"fixed": False, "adaptive": True}
    ),
    "algorithm.kl_ctrl.horizon": Import("algorithm.kl_penalty_fn_args.horizon"),
    "algorithm.kl_ctrl.target_kl": Import("algorithm.kl_penalty_fn_args.target_kl"),
    "algorithm.norm_adv_by_std_in_grpo": Import(rule=True),
    "data.train_files": Import("buffer.explorer_input.tasksets", rule=True),
    "data.val_files": Import("buffer.explorer_input.eval_tasksets", rule=True),
    "data.prompt_key": Import("buffer.explorer_input.taskset.format.prompt_key", rule=True),
    "data.response_key": Import("buffer.explorer_input.taskset.format.response_key", rule=True),
    "data.image_key": Import("buffer.explorer_input.taskset.format.image_key", rule=True),
    "data.shuffle": Import("buffer.explorer_input.taskset.data_selector.selector_type", rule=True),
    "data.train_batch_size": Import("synchronizer.sync_interval", rule=True),
    "data.val_batch_size": Import(why="an evaluation runs all its tasks at once"),
    "data.max_prompt_length": Import("model.max_prompt_tokens"),
    "data.max_response_length": Import("model.max_response_tokens"),
    "data.filter_overlong_prompts": Import("model.enable_prompt_truncation"),
    "data.truncation": Import(why="a cut prompt is left out of the loss, so its side is no matter"),
    "data.return_raw_chat": Import(why=f"{_OURS_DOES}: chat templates are applied to messages"),
    "data.trust_remote_code": Import("model.trust_remote_code"),
    "actor_rollout_ref.model.path": Import("model.model_path"),
    "actor_rollout_ref.model.trust_remote_code": Import("model.trust_remote_code"),
    "actor_rollout_ref.model.lora_rank": Import("model.lora_configs", rule=True),
    "actor_rollout_ref.model.lora_alpha": Import("model.lora_configs", rule=True),
    "actor_rollout_ref.model.target_modules": Import("model.lora_configs", rule=True),
    "actor_rollout_ref.hybrid_engine": Import(why="trainer and engines have their own GPUs"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": Import("buffer.batch_size", rule=True),
    "actor_rollout_ref.actor.use_dynamic_bsz": Import("trainer.use_dynamic_bsz"),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": Import("trainer.max_token_len_per_gpu"),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": Import(
        "trainer.ulysses_sequence_parallel_size"
    ),
    "actor_rollout_ref.actor.grad_clip": Import("trainer.grad_clip"),
    "actor_rollout_ref.actor.ppo_epochs": Import("trainer.ppo_epochs"),
    "actor_rollout_ref.actor.strategy": Import("trainer.trainer_strategy"),
    "actor_rollout_ref.actor.use_kl_loss": Import("algorithm.kl_loss_fn", rule=True),
    "actor_rollout_ref.actor.kl_loss_type": Import("algorithm.kl_loss_fn", rule=True),
    "actor_rollout_ref.actor.kl_loss_coef": Import("algorithm.kl_loss_fn_args.kl_coef", rule=True),
    "actor_rollout_ref.actor.entropy_coeff": Import("algorithm.entropy_loss_fn_args.entropy_coef"),
    "actor_rollout_ref.actor.clip_ratio": Import("algorithm.policy_loss_fn_args.clip_range"),
    "actor_rollout_ref.actor.clip_ratio_low": Import(
        "algorithm.policy_loss_fn_args.clip_range_low"
    ),
    "actor_rollout_ref.actor.clip_ratio_high": Import(
        "algorithm.policy_loss_fn_args.clip_range_high"
    ),
    "actor_rollout_ref.actor.clip_ratio_c": Import("algorithm.policy_loss_fn_args.clip_ratio_c"),
    "actor_rollout_ref.actor.loss_agg_mode": Import("algorithm.loss_agg_mode"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": Import(
        "algorithm.policy_loss_fn", values=_LOSSES
    ),
    "actor_rollout_ref.rollout.n": Import("algorithm.repeat_times", rule=True),
    "actor_rollout_ref.rollout.name": Import(f"{_ROLLOUT}.engine_type", rule=True),
    "actor_rollout_ref.rollout.mode": Import(why=f"{_OURS_DOES}: engines are asynchronous"),
    "actor_rollout_ref.rollout.gpu_memory_utilization": Import(
        f"{_ROLLOUT}.gpu_memory_utilization"
    ),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": Import(
        f"{_ROLLOUT}.tensor_parallel_size"
    ),
    "actor_rollout_ref.rollout.temperature": Import("model.temperature"),
    "actor_rollout_ref.rollout.top_p": Import("model.top_p"),
    "actor_rollout_ref.rollout.top_k": Import("model.top_k"),
    "actor_rollout_ref.rollout.max_model_len": Import("model.max_model_len"),
    "actor_rollout_ref.rollout.enforce_eager": Import(f"{_ROLLOUT}.enforce_eager"),
    "actor_rollout_ref.rollout.enable_chunked_prefill": Import(
        f"{_ROLLOUT}.enable_chunked_prefill"
    ),
    "actor_rollout_ref.rollout.dtype": Import(f"{_ROLLOUT}.dtype"),
    "actor_rollout_ref.rollout.free_cache_engine": Import(why="engines have GPUs of their own"),
    "actor_rollout_ref.rollout.load_format": Import(why="weights come from the synchronizer"),
    "actor_rollout_ref.rollout.max_num_batched_tokens": Import(
        f"{_ROLLOUT}.extra_engine_args.max_num_batched_tokens"
    ),
    "actor_rollout_ref.rollout.max_num_seqs": Import(f"{_ROLLOUT}.extra_engine_args.max_num_seqs"),
    "actor_rollout_ref.rollout.val_kwargs.temperature": Import(rule=True),
    "actor_rollout_ref.rollout.val_kwargs.top_p": Import(rule=True),
    "actor_rollout_ref.rollout.val_kwargs.top_k": Import(rule=True),
    "actor_rollout_ref.rollout.val_kwargs.n": Import(rule=True),
    "actor_rollout_ref.rollout.val_kwargs.do_sample": Import(rule=True),
    "critic.model.path": Import("model.critic_model_path"),
    "reward_model.enable": Import("explorer.auxiliary_models", rule=True),
    "reward_model.model.path": Import("explorer.auxiliary_models", rule=True),
    "reward_model.reward_manager": Import(
        why="rewards are functions: `buffer.explorer_input.default_reward_fn_type`"
    ),
    "custom_reward_function.path": Import(
        why="write it as a reward function in a plugin, and pass its folder with --plugin-dir"
    ),
    "custom_reward_function.name": Import(
        why="name it by `buffer.explorer_input.default_reward_fn_type`"
    ),
    "trainer.logger": Import("monitor.monitor_type", rule=True),
    "trainer.project_name": Import("project"),
    "trainer.experiment_name": Import("name"),
    "trainer.default_local_dir": Import("checkpoint_root_dir"),
    "trainer.n_gpus_per_node": Import("cluster.gpu_per_node", rule=True),
    "trainer.nnodes": Import("cluster.node_num", rule=True),
    "trainer.save_freq": Import("trainer.save_interval", rule=True),
    "trainer.test_freq": Import("explorer.eval_interval", rule=True),
    "trainer.total_epochs": Import("buffer.total_epochs"),
    "trainer.total_training_steps": Import("buffer.total_steps", also="trainer.total_steps"),
    "trainer.val_before_train": Import("explorer.eval_on_startup"),
    "trainer.resume_mode": Import(
        "continue_from_checkpoint", values={"auto": True, "disable": False}
    ),
    "trainer.resume_from_path": Import(
        why="a run goes on from its own job folder; start from another by `model.model_path`"
    ),
    "trainer.device": Import(why="the engine and the trainer find it; `--cpu` for none"),
    "trainer.val_only": Import(why="use `mode: bench`"),
}
"""veRL's dotted key -> where it goes."""

PREFIXES: dict[str, Import] = {
    "reward_model.": Import(why="the judge is an auxiliary model with engines of its own"),
    "actor_rollout_ref.rollout.": Import(
        why="rollouts are set in `explorer.rollout_model`, which has no such key"
    ),
    "hydra.": Import(why="there is no Hydra; one YAML file and `key=value` arguments"),
    "ray_init.": Import(why="Ray starts itself; join a cluster by `cluster.ray_address`"),
    "ray_kwargs.": Import(why="Ray starts itself; join a cluster by `cluster.ray_address`"),
}
"""Beginnings of keys, for those that are not listed above."""
