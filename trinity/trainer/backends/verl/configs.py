"""Our settings, and the keys of veRL that a run gives, as veRL's own config objects.

Only imported where veRL is installed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

from trinity.common.config.nearest import nearest
from trinity.common.config.verl.keys import ACTOR, MODEL, REF, VERL_KEYS, Use
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.verl.compat import can_pack
from trinity.trainer.backends.verl.settings import VerlEngineSettings
from trinity.trainer.engine import ModelRole

_ELSEWHERE = (Use.BOTH, Use.SAME)
_PREFIXES: dict[ModelRole, dict[str, tuple[str, ...]]] = {
    "actor": {
        "engine": (f"{ACTOR}.fsdp_config", ACTOR),
        "optimizer": (f"{ACTOR}.optim",),
        "model": (MODEL,),
    },
    "ref": {"engine": (f"{REF}.fsdp_config", REF), "optimizer": (), "model": (MODEL,)},
    "critic": {
        "engine": ("critic.model.fsdp_config", "critic"),
        "optimizer": ("critic.optim",),
        "model": ("critic.model",),
    },
}
_CLASSES: dict[str, Any] = {
    "engine": FSDPEngineConfig,
    "optimizer": FSDPOptimizerConfig,
    "model": HFModelConfig,
}
"""Part of a role's configuration -> veRL's class; prefixes of its keys are `_PREFIXES`."""


@dataclass(frozen=True)
class VerlConfigs:
    """All that one engine of veRL is built from."""

    model: HFModelConfig
    engine: FSDPEngineConfig
    optimizer: FSDPOptimizerConfig
    checkpoint: CheckpointConfig


def configs_of(role: ModelRole, settings: VerlEngineSettings, folder: str) -> VerlConfigs:
    """Configs of the model of ``role``, whose weights lie in ``folder``."""
    given = {part: _given(role, part, settings.verl) for part in _CLASSES}
    packs = settings.packs and can_pack(settings.device)
    packs = packs and bool(given["model"].pop("use_remove_padding", True))
    return VerlConfigs(
        HFModelConfig(**{**_model(role, settings, folder, packs), **given["model"]}),
        FSDPEngineConfig(**{**_engine(role, settings, packs), **given["engine"]}),
        FSDPOptimizerConfig(**{**_optimizer(settings.optimizer_of(role)), **given["optimizer"]}),
        CheckpointConfig(),
    )


def check_keys(verl: Mapping[str, object]) -> None:
    """Refuse keys that no config of veRL has.

    Raises:
        ValueError: With the key, and the nearest that veRL has.
    """
    for key in _handed_on(verl):
        if not any(_field(role, part, key) for role in _PREFIXES for part in _CLASSES):
            close = nearest(key, _all_keys(), cutoff=0.8)
            hint = f" Did you mean {close!r}?" if close else ""
            raise ValueError(f"trainer.trainer_config.{key} is no setting of veRL's engines.{hint}")


def _handed_on(verl: Mapping[str, object]) -> dict[str, object]:
    """What goes to veRL as it is: not what our trainer does, or has one setting for."""
    return {
        key: value
        for key, value in verl.items()
        if value is not None and (key not in VERL_KEYS or VERL_KEYS[key].use not in _ELSEWHERE)
    }


def _given(role: ModelRole, part: str, verl: Mapping[str, object]) -> dict[str, Any]:
    """Fields of a config object that the run gives."""
    found: dict[str, Any] = {}
    for key, value in _handed_on(verl).items():
        name = _field(role, part, key)
        if name:
            *path, last = name.split(".")
            node = found
            for step in path:
                node = node.setdefault(step, {})
            node[last] = value
    return found


def _field(role: ModelRole, part: str, key: str) -> str:
    """Name of the field (dotted below it) that a key of veRL is for; "" if it is for none here."""
    names = {field.name for field in fields(_CLASSES[part])}
    for prefix in _PREFIXES[role][part]:
        rest = key.removeprefix(f"{prefix}.")
        if rest != key and rest.split(".")[0] in names:
            return rest
    return ""


def _all_keys() -> Iterator[str]:
    for parts in _PREFIXES.values():
        for part, prefixes in parts.items():
            for prefix in prefixes:
                yield from (f"{prefix}.{field.name}" for field in fields(_CLASSES[part]))


def _model(
    role: ModelRole, settings: VerlEngineSettings, folder: str, packs: bool
) -> dict[str, Any]:
    return {
        "path": folder,
        "load_tokenizer": False,
        "trust_remote_code": settings.trust_remote_code,
        "enable_gradient_checkpointing": settings.memory_of(role).checkpointing,
        "use_remove_padding": packs,
        "override_config": {"attn_implementation": "flash_attention_2" if packs else "sdpa"},
    }


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
