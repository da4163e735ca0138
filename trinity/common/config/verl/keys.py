"""The keys of veRL that `trainer.trainer_config` takes, and what becomes of each.

`docs/verl_keys.md` is made from this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Use(Enum):
    """What becomes of a key."""

    OWN = "our key"
    """A key of ours means the same: its value goes there."""

    BOTH = "applied"
    """No key of ours; both backends apply it."""

    VERL = "veRL only"
    """veRL applies it; the torch backend takes the values that are true of it anyway."""

    ALWAYS = "always so"
    """A memory setting: veRL applies it; the torch backend always works in the frugal way."""

    SAME = "same as the actor"
    """There is one setting for all models, that of our key."""

    PROGRAM = "by trinity"
    """Trinity decides it; only values that say so are taken."""

    REFUSED = "refused"
    """Belongs elsewhere; our key says where."""


@dataclass(frozen=True)
class VerlKey:
    """One key of veRL.

    Args:
        key: Dotted, as in a veRL file.
        use: What becomes of it.
        ours: Our key of the same meaning.
        allowed: Values that need nothing done (`VERL` with the torch backend, and `PROGRAM`).
        why: Why other values are refused, or what the key means here.
        values: veRL's value -> ours, where they are spelled differently.
        kind: What a value is: "count" (1, 2 ...), "float", "bool".
        like: Our key that takes the same values, in place of ``kind``.
    """

    key: str
    use: Use
    ours: str = ""
    allowed: tuple[Any, ...] = ()
    why: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    kind: str = ""
    like: str = ""


ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
_SHARDING = "the torch backend shards layer by layer over all its GPUs"
_CHECKPOINT = (
    "a checkpoint holds model, optimizer and extra state; Hugging Face files by "
    "`trainer.save_hf_checkpoint`"
)
_CONTENTS = ["model", "optimizer", "extra"]
_MEGATRON_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
)


def _fsdp(prefix: str) -> Iterator[VerlKey]:
    where = f"{prefix}.fsdp_config"
    yield VerlKey(f"{where}.wrap_policy.min_num_params", Use.VERL, "", (0, None), _SHARDING)
    wrap = f"{where}.wrap_policy.transformer_layer_cls_to_wrap"
    yield VerlKey(wrap, Use.VERL, "", (None,), _SHARDING)
    yield VerlKey(f"{where}.fsdp_size", Use.VERL, "", (-1, None), _SHARDING)
    yield VerlKey(f"{where}.forward_prefetch", Use.VERL, "", (False, None), _SHARDING)
    yield VerlKey(f"{where}.reshard_after_forward", Use.VERL, "", (True, None), _SHARDING)


def _optimizer_own() -> Iterator[VerlKey]:
    ours = "algorithm.optimizer"
    for name in ("lr", "lr_warmup_steps", "lr_warmup_steps_ratio", "min_lr_ratio"):
        yield VerlKey(f"{ACTOR}.optim.{name}", Use.OWN, f"{ours}.{name}")
    for name in ("warmup_style", "lr_scheduler_type"):
        yield VerlKey(f"{ACTOR}.optim.{name}", Use.OWN, f"{ours}.lr_scheduler_type")
    for name in ("weight_decay", "betas", "clip_grad"):
        yield VerlKey(f"{ACTOR}.optim.{name}", Use.OWN, f"{ours}.{name}")
    yield _total_steps(ACTOR)


def _optimizer_critic() -> Iterator[VerlKey]:
    what, ours = "the critic's optimizer", "algorithm.optimizer"
    for name in ("lr", "lr_warmup_steps_ratio", "min_lr_ratio", "weight_decay", "lr_warmup_steps"):
        yield VerlKey(f"critic.optim.{name}", Use.BOTH, why=what, like=f"{ours}.{name}")
    for name in ("warmup_style", "lr_scheduler_type"):
        like = f"{ours}.lr_scheduler_type"
        yield VerlKey(f"critic.optim.{name}", Use.BOTH, why=what, like=like)
    yield VerlKey("critic.optim.betas", Use.BOTH, why=what, like=f"{ours}.betas")
    yield _total_steps("critic")


def _total_steps(part: str) -> VerlKey:
    why = "the schedule is as long as the run: `trainer.total_steps`"
    return VerlKey(f"{part}.optim.total_training_steps", Use.PROGRAM, "", (-1, None), why)


def _actor() -> Iterator[VerlKey]:
    yield VerlKey(f"{ACTOR}.strategy", Use.OWN, "trainer.trainer_strategy")
    rows = "rows of a micro-batch where `trainer.use_dynamic_bsz` is false"
    yield VerlKey(f"{ACTOR}.ppo_micro_batch_size_per_gpu", Use.BOTH, why=rows, kind="count")
    yield VerlKey(f"{ACTOR}.use_dynamic_bsz", Use.OWN, "trainer.use_dynamic_bsz")
    ours = "trainer.max_token_len_per_gpu"
    yield VerlKey(f"{ACTOR}.ppo_max_token_len_per_gpu", Use.OWN, ours)
    yield VerlKey(f"{ACTOR}.grad_clip", Use.OWN, "trainer.grad_clip")
    yield VerlKey(f"{ACTOR}.ppo_epochs", Use.OWN, "trainer.ppo_epochs")
    why = "shuffle rows before each pass over a batch"
    yield VerlKey(f"{ACTOR}.shuffle", Use.BOTH, why=why, kind="bool")
    name = "ulysses_sequence_parallel_size"
    yield VerlKey(f"{ACTOR}.{name}", Use.OWN, f"trainer.{name}")
    yield from _chunking(ACTOR)
    for name in ("load_contents", "save_contents", "contents"):
        key = f"{ACTOR}.checkpoint.{name}"
        yield VerlKey(key, Use.PROGRAM, "", (_CONTENTS,), _CHECKPOINT)
    for name in ("param_offload", "optimizer_offload", "offload_policy"):
        yield VerlKey(f"{ACTOR}.fsdp_config.{name}", Use.OWN, f"trainer.{name}")
    for name in ("param_offload", "optimizer_offload", "grad_offload"):
        yield VerlKey(f"{ACTOR}.megatron.{name}", Use.OWN, f"trainer.{name}")
    for name in _MEGATRON_SIZES:
        yield VerlKey(f"{ACTOR}.megatron.{name}", Use.OWN, f"trainer.megatron.{name}")
        for part in (REF, "critic"):
            yield VerlKey(f"{part}.megatron.{name}", Use.SAME, f"trainer.megatron.{name}")
    yield from _fsdp(ACTOR)
    yield from _optimizer_own()


def _chunking(part: str) -> Iterator[VerlKey]:
    why = "the torch backend never holds logits of a whole batch"
    for name in ("entropy_from_logits_with_chunking", "entropy_checkpointing"):
        yield VerlKey(f"{part}.{name}", Use.ALWAYS, why=why, kind="bool")


def _model() -> Iterator[VerlKey]:
    why = "rollouts come from the explorer's engines"
    yield VerlKey("actor_rollout_ref.hybrid_engine", Use.PROGRAM, "", (True, None), why)
    yield VerlKey(f"{MODEL}.path", Use.OWN, "model.model_path")
    why = "it would be imported by veRL; use --plugin-dir"
    yield VerlKey(f"{MODEL}.external_lib", Use.VERL, "", (None,), why)
    why = "the torch backend takes the model's own config"
    yield VerlKey(f"{MODEL}.override_config", Use.VERL, "", ({}, None), why)
    ours = "trainer.enable_gradient_checkpointing"
    yield VerlKey(f"{MODEL}.enable_gradient_checkpointing", Use.OWN, ours)
    yield VerlKey(f"{MODEL}.use_remove_padding", Use.OWN, "trainer.use_remove_padding")
    yield VerlKey(f"{MODEL}.trust_remote_code", Use.OWN, "trainer.trust_remote_code")
    why = "the torch backend computes logits in chunks instead"
    yield VerlKey(f"{MODEL}.use_fused_kernels", Use.VERL, "", (False, None), why)
    yield VerlKey(f"{MODEL}.fused_kernel_options.impl_backend", Use.VERL, "", (None,), why)


def _reference() -> Iterator[VerlKey]:
    why = "keep the reference model in CPU memory while it is not used"
    yield VerlKey(f"{REF}.fsdp_config.param_offload", Use.BOTH, why=why, kind="bool")
    yield from _fsdp(REF)
    for part, what in ((REF, "the reference model's"), (ROLLOUT, "recomputed old")):
        why = f"rows of a forward pass for {what} logprobs, without dynamic batches"
        yield VerlKey(f"{part}.log_prob_micro_batch_size_per_gpu", Use.BOTH, why=why, kind="count")
        why = f"fill forward passes for {what} logprobs by tokens"
        yield VerlKey(f"{part}.log_prob_use_dynamic_bsz", Use.BOTH, why=why, kind="bool")
        why = f"tokens of a forward pass for {what} logprobs"
        yield VerlKey(f"{part}.log_prob_max_token_len_per_gpu", Use.BOTH, why=why, kind="count")
    name = "ulysses_sequence_parallel_size"
    yield VerlKey(f"{REF}.{name}", Use.SAME, f"trainer.{name}")
    yield VerlKey(f"{REF}.strategy", Use.SAME, "trainer.trainer_strategy")
    yield from _chunking(REF)


def _critic() -> Iterator[VerlKey]:
    yield VerlKey("critic.strategy", Use.SAME, "trainer.trainer_strategy")
    yield VerlKey("critic.model.path", Use.OWN, "model.critic_model_path")
    why = "it would be imported by veRL; use --plugin-dir"
    yield VerlKey("critic.model.external_lib", Use.VERL, "", (None,), why)
    why = "the torch backend takes the model's own config"
    yield VerlKey("critic.model.override_config", Use.VERL, "", ({}, None), why)
    why = "compute the critic's activations twice instead of keeping them"
    yield VerlKey("critic.model.enable_gradient_checkpointing", Use.BOTH, why=why, kind="bool")
    why = "the torch backend always packs the critic's sequences"
    yield VerlKey("critic.model.use_remove_padding", Use.ALWAYS, why=why, kind="bool")
    for name, what in (("param_offload", "weights"), ("optimizer_offload", "optimizer state")):
        why = f"keep the critic's {what} in CPU memory while not used"
        yield VerlKey(f"critic.model.fsdp_config.{name}", Use.BOTH, why=why, kind="bool")
    yield from _fsdp("critic.model")
    yield from _optimizer_critic()
    yield from _critic_batches()
    yield VerlKey("critic.ppo_epochs", Use.SAME, "trainer.ppo_epochs")
    yield VerlKey("critic.shuffle", Use.SAME, f"trainer.trainer_config.{ACTOR}.shuffle")
    name = "ulysses_sequence_parallel_size"
    yield VerlKey(f"critic.{name}", Use.SAME, f"trainer.{name}")
    why = "largest gradient norm of the critic"
    yield VerlKey("critic.grad_clip", Use.BOTH, why=why, like="trainer.grad_clip")
    why = "how far a value may move from the old one before its loss is clipped"
    yield VerlKey("critic.cliprange_value", Use.BOTH, why=why, kind="float")
    for name in ("load_contents", "save_contents", "contents"):
        yield VerlKey(f"critic.checkpoint.{name}", Use.PROGRAM, "", (_CONTENTS,), _CHECKPOINT)


def _critic_batches() -> Iterator[VerlKey]:
    for way, what in (("ppo", "micro-batch"), ("forward", "forward pass")):
        why = f"rows of the critic's {what}, without dynamic batches"
        yield VerlKey(f"critic.{way}_micro_batch_size_per_gpu", Use.BOTH, why=why, kind="count")
        why = f"tokens of the critic's {what}, with dynamic batches"
        yield VerlKey(f"critic.{way}_max_token_len_per_gpu", Use.BOTH, why=why, kind="count")
    why = "fill the critic's batches by tokens"
    yield VerlKey("critic.use_dynamic_bsz", Use.BOTH, why=why, kind="bool")


def _trainer() -> Iterator[VerlKey]:
    yield VerlKey("trainer.balance_batch", Use.OWN, "trainer.balance_batch")
    yield VerlKey("trainer.total_training_steps", Use.OWN, "trainer.total_steps")
    resume = {"auto": True, "disable": False}
    yield VerlKey("trainer.resume_mode", Use.OWN, "continue_from_checkpoint", values=resume)
    why = "a run goes on from its own job folder; start from another by `model.model_path`"
    yield VerlKey("trainer.resume_from_path", Use.PROGRAM, "", ("", None, False), why)
    yield VerlKey("trainer.critic_warmup", Use.OWN, "trainer.critic_warmup")
    why = "checkpoints lie below `checkpoint_root_dir`"
    yield VerlKey("trainer.default_hdfs_dir", Use.PROGRAM, "", (None,), why)
    why = "set `trainer.max_checkpoints_to_keep: 1`"
    yield VerlKey("trainer.remove_previous_ckpt_in_save", Use.PROGRAM, "", (False, None), why)
    why = "a checkpoint that was read stays"
    yield VerlKey("trainer.del_local_ckpt_after_load", Use.PROGRAM, "", (False, None), why)
    for part in ("actor", "critic"):
        ours = "trainer.max_checkpoints_to_keep"
        yield VerlKey(f"trainer.max_{part}_ckpt_to_keep", Use.OWN, ours)


def _refused() -> Iterator[VerlKey]:
    elsewhere = {
        f"{ACTOR}.ppo_mini_batch_size": "buffer.train_batch_size",
        f"{ACTOR}.ppo_micro_batch_size": f"trainer.trainer_config.{ACTOR}."
        "ppo_micro_batch_size_per_gpu",
        f"{REF}.log_prob_micro_batch_size": f"trainer.trainer_config.{REF}."
        "log_prob_micro_batch_size_per_gpu",
        f"{ACTOR}.use_kl_loss": "algorithm.kl_loss_fn",
        f"{ACTOR}.kl_loss_type": "algorithm.kl_loss_fn",
        f"{ACTOR}.kl_loss_coef": "algorithm.kl_loss_fn_args.kl_coef",
        f"{ACTOR}.entropy_coeff": "algorithm.entropy_loss_fn_args.entropy_coef",
        f"{ACTOR}.clip_ratio": "algorithm.policy_loss_fn_args.clip_range",
        f"{ACTOR}.clip_ratio_low": "algorithm.policy_loss_fn_args.clip_range_low",
        f"{ACTOR}.clip_ratio_high": "algorithm.policy_loss_fn_args.clip_range_high",
        f"{ACTOR}.clip_ratio_c": "algorithm.policy_loss_fn_args.clip_ratio_c",
        f"{ACTOR}.loss_agg_mode": "algorithm.loss_agg_mode",
        f"{MODEL}.lora_rank": "model.lora_configs",
        f"{MODEL}.lora_alpha": "model.lora_configs",
        f"{MODEL}.target_modules": "model.lora_configs",
        "critic.ppo_mini_batch_size": "buffer.train_batch_size",
        "critic.rollout_n": "algorithm.repeat_times",
    }
    for key, ours in elsewhere.items():
        yield VerlKey(key, Use.REFUSED, ours)


VERL_KEYS: dict[str, VerlKey] = {
    entry.key: entry
    for group in (_model, _actor, _reference, _critic, _trainer, _refused)
    for entry in group()
}
"""veRL's dotted key -> what becomes of it."""

_FLAT = frozenset(("actor", "ref", "rollout", "model", "hybrid_engine"))


def wrapped(trainer_config: Mapping[str, Any]) -> dict[str, Any]:
    """``trainer_config`` with flat `actor`, `ref`, ... put under `actor_rollout_ref`."""
    inner = {key: value for key, value in trainer_config.items() if key in _FLAT}
    rest = {key: value for key, value in trainer_config.items() if key not in _FLAT}
    if inner:
        rest["actor_rollout_ref"] = {**(rest.get("actor_rollout_ref") or {}), **inner}
    return rest


def leaves(trainer_config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted veRL key -> value. A mapping that is a value itself counts as a leaf."""
    flat: dict[str, Any] = {}
    _collect("", wrapped(trainer_config), flat)
    return flat


def _collect(prefix: str, node: Mapping[str, Any], flat: dict[str, Any]) -> None:
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in VERL_KEYS and value:
            _collect(f"{key}.", value, flat)
        elif not (isinstance(value, Mapping) and key not in VERL_KEYS):
            flat[key] = value


def for_verl(trainer_config: Mapping[str, Any]) -> dict[str, Any]:
    """What veRL is to be given as it is: dotted key -> value, without what our keys decide."""
    decided = (Use.OWN, Use.PROGRAM, Use.REFUSED)
    return {
        key: value
        for key, value in leaves(trainer_config).items()
        if key not in VERL_KEYS or VERL_KEYS[key].use not in decided
    }
