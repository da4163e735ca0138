"""Checks of adapters: the one that is trained, and those that clients of the API may name."""

from __future__ import annotations

from collections.abc import Iterator

from trinity.common.config.case import Case, Check
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.config.nearest import nearest
from trinity.common.constants import EngineType
from trinity.common.errors import Problem

_ROLLOUT = "explorer.rollout_model"
_VLLM_RANK = 512

_VLLM_SETTINGS = {
    "default_mm_loras",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
    "enable_tower_connector_lora",
    "fully_sharded_loras",
    "lora_dtype",
    "max_cpu_loras",
    "max_lora_cls_labels",
    "max_lora_rank",
    "max_loras",
    "specialize_active_lora",
    "target_modules",
}
"""vLLM's settings for adapters (0.32; the engine refuses what another version lacks)."""


def models_of(case: Case) -> dict[str, InferenceModelConfig]:
    """Key of each model that generates in this run -> its section."""
    explorer = case.config.explorer
    if not case.config.mode.explores:
        return {}
    auxiliary = {
        f"explorer.auxiliary_models.{index}": model
        for index, model in enumerate(explorer.auxiliary_models)
    }
    return {_ROLLOUT: explorer.rollout_model, **auxiliary}


def _lora(case: Case) -> Iterator[Problem]:
    loras = case.config.model.lora_configs or []
    if len(loras) > 1:
        message = f"One adapter can be trained at a time; here are {len(loras)}."
        yield Problem("model.lora_configs", message, "Keep one of them.")


def _lora_engines(case: Case) -> Iterator[Problem]:
    loras = case.config.model.lora_configs or []
    for index, lora in enumerate(loras):
        if lora.lora_dtype != "auto":
            key = f"model.lora_configs.{index}.lora_dtype"
            message = "An adapter has the number format of its model."
            yield case.problem(key, message, "Remove it; `trainer.dtype` sets it.")
        engine = case.config.explorer.rollout_model.engine_type
        if engine is EngineType.VLLM and lora.lora_rank > _VLLM_RANK:
            message = f"vLLM serves adapters of rank {_VLLM_RANK} at most."
            fix = "Lower it, or set `explorer.rollout_model.engine_type: torch`."
            yield case.problem(f"model.lora_configs.{index}.lora_rank", message, fix)
    for key, model in models_of(case).items():
        is_rollout = key == _ROLLOUT
        if model.enable_lora and not (is_rollout and loras):
            message = "Adapters are served on the model that is trained, as `model.lora_configs`."
            yield case.problem(f"{key}.enable_lora", message, "Remove it.")


def _named(case: Case) -> Iterator[Problem]:
    """The adapters of `lora_modules`: whole, and each under a name of its own."""
    for key, model in models_of(case).items():
        taken = _names_of_model(case, key, model)
        for index, module in enumerate(model.lora_modules or []):
            place = f"{key}.lora_modules.{index}"
            for name in ("name", "path"):
                if not getattr(module, name):
                    message = f"An adapter needs a {name}."
                    yield Problem(f"{place}.{name}", message, f"Add `{name}: ...` to it.")
            if module.name in taken:
                message = f"The name {module.name!r} is taken by {taken[module.name]}."
                yield case.problem(f"{place}.name", message, "Give it another one.")
            if module.name:
                taken[module.name] = f"`{place}`"


def _names_of_model(case: Case, key: str, model: InferenceModelConfig) -> dict[str, str]:
    """Names that requests may have already -> what they stand for."""
    names = {model.name or "": "the model", model.model_path or "": "the model"}
    if key == _ROLLOUT:
        loras = case.config.model.lora_configs or []
        names |= {lora.name or "lora": "the adapter that is trained" for lora in loras}
    names.pop("", None)
    return names


def _named_engines(case: Case) -> Iterator[Problem]:
    """Who can serve them, and to whom."""
    for key, model in models_of(case).items():
        wanted = {
            f"{key}.lora_modules": bool(model.lora_modules),
            f"{key}.enable_runtime_lora_updating": model.enable_runtime_lora_updating,
        }
        for own, is_wanted in wanted.items():
            if not is_wanted:
                continue
            if model.engine_type not in (EngineType.VLLM, EngineType.TORCH):
                message = f"The engine `{model.engine_type}` serves no adapters of a folder."
                yield case.problem(own, message, "Remove it, or use `vllm` or `torch`.")
            elif not (model.enable_openai_api or model.base_port):
                message = "Adapters are named by clients of the API, which is off."
                fix = f"Set `{key}.enable_openai_api: true`, or remove it."
                yield case.problem(own, message, fix)


def _settings_of_vllm(case: Case) -> Iterator[Problem]:
    """`lora_kwargs`: names that vLLM knows, where it has adapters."""
    for key, model in models_of(case).items():
        own = f"{key}.lora_kwargs"
        if not model.lora_kwargs:
            continue
        has_any = model.enable_lora or model.lora_modules or model.enable_runtime_lora_updating
        if model.engine_type is not EngineType.VLLM:
            message = f"These are settings of vLLM, and the engine is `{model.engine_type}`."
            yield case.problem(own, message, "Remove it.")
        elif not has_any:
            message = "There are no adapters that it could be about."
            fix = "Remove it, or add `model.lora_configs` or `lora_modules`."
            yield case.problem(own, message, fix)
        for name in model.lora_kwargs.keys() - _VLLM_SETTINGS:
            close = nearest(name, _VLLM_SETTINGS)
            hint = f"Did you mean `{close}`?" if close else "Remove it."
            known = ", ".join(sorted(_VLLM_SETTINGS))
            yield case.problem(f"{own}.{name}", f"vLLM's settings are {known}.", hint)


ADAPTER_CHECKS: tuple[Check, ...] = (
    _lora,
    _lora_engines,
    _named,
    _named_engines,
    _settings_of_vllm,
)
