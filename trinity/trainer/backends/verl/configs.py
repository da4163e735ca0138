"""Our settings, and the keys of veRL that a run gives, as veRL's own config objects.

Only imported where veRL is installed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
)

from trinity.common.config.nearest import nearest
from trinity.common.config.verl.keys import ACTOR, MODEL, REF, VERL_KEYS, Use
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.verl.compat import can_pack
from trinity.trainer.backends.verl.settings import Strategy, VerlEngineSettings
from trinity.trainer.engine import ModelRole

_ELSEWHERE = (Use.BOTH, Use.SAME)
_ROLES: tuple[ModelRole, ...] = ("actor", "ref", "critic")
_OPTIMIZER: dict[ModelRole, tuple[str, ...]] = {
    "actor": (f"{ACTOR}.optim",),
    "ref": (),
    "critic": ("critic.optim",),
}
_MODEL: dict[ModelRole, tuple[str, ...]] = {
    "actor": (MODEL,),
    "ref": (MODEL,),
    "critic": ("critic.model",),
}
_FSDP: dict[ModelRole, tuple[str, ...]] = {
    "actor": (f"{ACTOR}.fsdp_config", ACTOR),
    "ref": (f"{REF}.fsdp_config", REF),
    "critic": ("critic.model.fsdp_config", "critic"),
}
_MEGATRON: dict[ModelRole, tuple[str, ...]] = {
    "actor": (f"{ACTOR}.megatron", ACTOR),
    "ref": (f"{REF}.megatron", REF),
    "critic": ("critic.megatron", "critic"),
}
_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@dataclass(frozen=True)
class Part:
    """A part of a model's configuration: veRL's class, and the prefixes of its keys by role."""

    kind: Any
    prefixes: dict[ModelRole, tuple[str, ...]]


_PARTS_OF_FSDP = {
    "engine": Part(FSDPEngineConfig, _FSDP),
    "optimizer": Part(FSDPOptimizerConfig, _OPTIMIZER),
    "model": Part(HFModelConfig, _MODEL),
}
_PARTS_OF_MEGATRON = {
    "engine": Part(McoreEngineConfig, _MEGATRON),
    "optimizer": Part(McoreOptimizerConfig, _OPTIMIZER),
    "model": Part(HFModelConfig, _MODEL),
}


@dataclass(frozen=True)
class Padding:
    """In place of a tokenizer, of which veRL's Megatron engine wants this alone."""

    pad_token_id: int = 0


def _parts(strategy: Strategy) -> dict[str, Part]:
    return _PARTS_OF_MEGATRON if strategy == "megatron" else _PARTS_OF_FSDP


@dataclass(frozen=True)
class VerlConfigs:
    """All that one engine of veRL is built from."""

    model: HFModelConfig
    engine: FSDPEngineConfig | McoreEngineConfig
    optimizer: FSDPOptimizerConfig | McoreOptimizerConfig
    checkpoint: CheckpointConfig


def configs_of(role: ModelRole, settings: VerlEngineSettings, folder: str) -> VerlConfigs:
    """Configs of the model of ``role``, whose weights lie in ``folder``."""
    parts = _parts(settings.strategy)
    given = {name: _given(part, role, settings.verl) for name, part in parts.items()}
    packs = settings.packs and (settings.is_megatron or can_pack(settings.device))
    packs = packs and bool(given["model"].pop("use_remove_padding", True))
    make_engine, make_optimizer = _engine, _optimizer
    if settings.is_megatron:
        make_engine, make_optimizer = _megatron_engine, _megatron_optimizer
    own = {
        "model": _model(role, settings, folder, packs),
        "engine": make_engine(role, settings, packs),
        "optimizer": make_optimizer(settings.optimizer_of(role)),
    }
    made = {name: part.kind(**_merged(own[name], given[name])) for name, part in parts.items()}
    if settings.is_megatron:
        made["model"].tokenizer = Padding()
    return VerlConfigs(**made, checkpoint=CheckpointConfig())


def _merged(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a run gives goes before ours, key by key in mappings such as ``override_...``."""
    merged = {**own, **given}
    for name, value in own.items():
        if isinstance(value, dict) and isinstance(given.get(name), dict):
            merged[name] = {**value, **given[name]}
    return merged


def check_keys(verl: Mapping[str, object], strategy: Strategy) -> None:
    """Refuse keys that no config of veRL has.

    Raises:
        ValueError: With the key, and the nearest that veRL has.
    """
    parts = _parts(strategy).values()
    for key in _handed_on(verl):
        if not any(_field(part, role, key) for role in _ROLES for part in parts):
            close = nearest(key, _all_keys(parts), cutoff=0.8)
            hint = f" Did you mean {close!r}?" if close else ""
            raise ValueError(f"trainer.trainer_config.{key} is no setting of veRL's engines.{hint}")


def _handed_on(verl: Mapping[str, object]) -> dict[str, object]:
    """What goes to veRL as it is: not what our trainer does, or has one setting for."""
    return {
        key: value
        for key, value in verl.items()
        if value is not None and (key not in VERL_KEYS or VERL_KEYS[key].use not in _ELSEWHERE)
    }


def _given(part: Part, role: ModelRole, verl: Mapping[str, object]) -> dict[str, Any]:
    """Fields of a config object that the run gives."""
    found: dict[str, Any] = {}
    for key, value in _handed_on(verl).items():
        name = _field(part, role, key)
        if name:
            *path, last = name.split(".")
            node = found
            for step in path:
                node = node.setdefault(step, {})
            node[last] = value
    return found


def _field(part: Part, role: ModelRole, key: str) -> str:
    """Name of the field (dotted below it) that a key of veRL is for; "" if it is for none here."""
    names = {field.name for field in fields(part.kind)}
    for prefix in part.prefixes[role]:
        rest = key.removeprefix(f"{prefix}.")
        if rest != key and rest.split(".")[0] in names:
            return rest
    return ""


def _all_keys(parts: Iterable[Part]) -> Iterator[str]:
    for part in parts:
        for prefixes in part.prefixes.values():
            for prefix in prefixes:
                yield from (f"{prefix}.{field.name}" for field in fields(part.kind))


def _model(
    role: ModelRole, settings: VerlEngineSettings, folder: str, packs: bool
) -> dict[str, Any]:
    attention = "flash_attention_2" if packs and not settings.is_megatron else "sdpa"
    own = {
        "path": folder,
        "load_tokenizer": False,
        "trust_remote_code": settings.trust_remote_code,
        "enable_gradient_checkpointing": settings.memory_of(role).checkpointing,
        "use_remove_padding": packs,
        "override_config": {"attn_implementation": attention},
    }
    if settings.is_megatron and role == "critic":
        own["model_type"] = "value_model"
    return own


def _engine(role: ModelRole, settings: VerlEngineSettings, packs: bool) -> dict[str, Any]:
    """What differs on a CPU: FSDP1 starts on GPUs only, and there is no other memory to move to."""
    dtype = {"float32": "fp32", "bfloat16": "bf16"}[settings.dtype]
    memory = settings.memory_of(role)
    is_cpu = settings.device == "cpu"
    return {
        "strategy": "fsdp2" if is_cpu else settings.strategy,
        "param_offload": memory.param_offload and not is_cpu,
        "optimizer_offload": memory.optimizer_offload and not is_cpu,
        "offload_policy": settings.offload_policy and not is_cpu,
        "forward_only": role == "ref" and not is_cpu,
        "dtype": settings.dtype,
        "model_dtype": "fp32",
        "mixed_precision": {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        "ulysses_sequence_parallel_size": settings.sequence_parallel,
        "use_remove_padding": packs,
        "use_torch_compile": not is_cpu,
        "seed": settings.seed,
    }


def _optimizer(given: OptimizerSettings) -> dict[str, Any]:
    """The learning rate is set for every step, so veRL's schedule is the constant one."""
    return {
        "lr": given.lr,
        "betas": given.betas,
        "weight_decay": given.weight_decay,
        "clip_grad": given.clip_grad or float("inf"),
        "total_training_steps": given.schedule.total_steps or -1,
        "lr_scheduler_type": "constant",
        "override_optimizer_config": {"eps": given.eps},
    }


def _megatron_engine(role: ModelRole, settings: VerlEngineSettings, packs: bool) -> dict[str, Any]:
    """Of attention kernels veRL takes flash-attn's alone, unless told otherwise.

    Gradients of the output layer are added up in one kernel with their product where Apex is.
    """
    memory, sizes = settings.memory_of(role), settings.megatron
    attention = "flash" if can_pack(settings.device) else "auto"
    return {
        "param_offload": memory.param_offload,
        "optimizer_offload": memory.optimizer_offload,
        "forward_only": role == "ref",
        "dtype": settings.dtype,
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.virtual_pipeline,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.expert_tensor,
        "context_parallel_size": sizes.context,
        "sequence_parallel": sizes.sequence_parallel,
        "use_remove_padding": packs,
        "override_transformer_config": {
            "attention_backend": attention,
            "gradient_accumulation_fusion": find_spec("fused_weight_gradient_mlp_cuda") is not None,
            **(_RECOMPUTE if memory.checkpointing else {}),
        },
        "dist_ckpt_optim_fully_reshardable": True,
        "seed": settings.seed,
    }


def _megatron_optimizer(given: OptimizerSettings) -> dict[str, Any]:
    """Learning rate and weight decay are set for every step, so the schedules are constant."""
    beta1, beta2 = given.betas
    return {
        "lr": given.lr,
        "weight_decay": given.weight_decay,
        "clip_grad": given.clip_grad or 0.0,
        "total_training_steps": given.schedule.total_steps or 1,
        "lr_warmup_steps": 0,
        "lr_decay_style": "constant",
        "override_optimizer_config": {
            "adam_beta1": beta1,
            "adam_beta2": beta2,
            "adam_eps": given.eps,
        },
    }
