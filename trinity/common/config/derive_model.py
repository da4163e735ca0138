"""Open values of `model:`, of the rollout model and of auxiliary models."""

from __future__ import annotations

from typing import NamedTuple

from trinity.common.config.fill import Filler
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.config.model import ModelConfig
from trinity.common.constants import ConcurrentMode, EngineType, Mode, SaveHF, TrainerType

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "logprobs",
    "repetition_penalty",
    "enable_prompt_truncation",
    "enable_thinking",
)
_LENGTHS = ("max_model_len", "max_prompt_tokens", "max_response_tokens")
_COLOCATED_MEMORY = 0.25


class Lengths(NamedTuple):
    """Token limits of a sequence, of its prompt and of its response; None where unknown."""

    total: int | None
    prompt: int | None
    response: int | None


def fill_lengths(total: int | None, prompt: int | None, response: int | None) -> Lengths:
    """The limits that are open, from those that are not.

    With the total alone each part gets half; with the total and one part, the other part gets
    the rest. Without a total both parts are needed.
    """
    if total is None:
        total = prompt + response if prompt and response else None
    if total is None or (prompt and response):
        return Lengths(total, prompt, response)
    if prompt is None and response is None:
        return Lengths(total, total - total // 2, total // 2)
    if prompt is None:
        return Lengths(total, max(total - (response or 0), 1), response)
    return Lengths(total, prompt, max(total - prompt, 1))


def derive_models(filler: Filler) -> None:
    """Fill in `model:` and the models of `explorer:`."""
    config = filler.config
    _fill_own_lengths(filler, "model", config.model)
    filler.copy("model.critic_model_path", "model.model_path")
    _choose_services(filler)
    _ask_service(filler, "explorer.rollout_model", config.explorer.rollout_model)
    _derive_rollout_model(filler)
    for index, model in enumerate(config.explorer.auxiliary_models):
        key = f"explorer.auxiliary_models.{index}"
        _ask_service(filler, key, model)
        _derive_auxiliary_model(filler, key, model)
    _limit_runners(filler)


def _fill_own_lengths(filler: Filler, key: str, model: ModelConfig | InferenceModelConfig) -> None:
    given = (model.max_model_len, model.max_prompt_tokens, model.max_response_tokens)
    filled = fill_lengths(*given)
    for name, value in zip(_LENGTHS, filled, strict=True):
        filler.default(f"{key}.{name}", value, "from the other token limits")


def _choose_services(filler: Filler) -> None:
    config = filler.config
    if config.model.external_model.enable:
        why = "model.external_model.enable"
        filler.put("explorer.rollout_model.engine_type", EngineType.OPENAI, why)
        external = config.model.external_model.model_copy()
        filler.put("explorer.rollout_model.external_model_config", external, why)
    if config.model.tinker.enable:
        why = "model.tinker.enable"
        filler.put("trainer.trainer_type", TrainerType.TINKER, why)
        filler.put("explorer.rollout_model.engine_type", EngineType.TINKER, why)
        if not filler.is_set("trainer.save_hf_checkpoint"):
            filler.put("trainer.save_hf_checkpoint", SaveHF.NEVER, "the weights stay at Tinker")


def _ask_service(filler: Filler, key: str, model: InferenceModelConfig) -> None:
    """`external_model_config.enable` is another way to say `engine_type: openai`."""
    if model.external_model_config.enable:
        why = "external_model_config.enable"
        filler.put(f"{key}.engine_type", EngineType.OPENAI, why)


def _derive_rollout_model(filler: Filler) -> None:
    model, key = filler.config.model, "explorer.rollout_model"
    filler.copy(f"{key}.model_path", "model.model_path")
    names = (*_SAMPLING, *_LENGTHS, "min_response_tokens", "rope_scaling", "rope_theta")
    for name in names:
        filler.copy(f"{key}.{name}", f"model.{name}")
    filler.copy(f"{key}.chat_template", "model.custom_chat_template")
    if model.trust_remote_code:
        filler.put(f"{key}.trust_remote_code", True, "as model.trust_remote_code")
        filler.put("trainer.trust_remote_code", True, "as model.trust_remote_code")
    if model.lora_configs:
        filler.put(f"{key}.enable_lora", True, "model.lora_configs")
    if filler.config.algorithm.enable_router_replay:
        why = "algorithm.enable_router_replay"
        filler.put(f"{key}.enable_return_routed_experts", True, why)
    if filler.config.mode is Mode.SERVE:
        filler.put(f"{key}.enable_openai_api", True, "mode serve")
    if filler.config.mode is Mode.COLOCATE and not filler.is_set(f"{key}.gpu_memory_utilization"):
        why = "the GPU is shared with the trainer"
        filler.put(f"{key}.gpu_memory_utilization", _COLOCATED_MEMORY, why)


def _derive_auxiliary_model(filler: Filler, key: str, aux: InferenceModelConfig) -> None:
    _fill_own_lengths(filler, key, aux)
    filler.copy(f"{key}.name", f"{key}.model_path")
    filler.put(f"{key}.enable_openai_api", True, "auxiliary models are asked through the API")
    filler.put(f"{key}.enable_history", False, "only the rollout model's calls are trained on")
    names = (*_SAMPLING, *(_LENGTHS if aux.max_model_len is None else ()))
    for name in names:
        filler.copy(f"{key}.{name}", f"model.{name}")


def _limit_runners(filler: Filler) -> None:
    """Concurrent repeats need no more runners than there are tasks for each engine."""
    config = filler.config
    if config.explorer.concurrent_mode is ConcurrentMode.SEQUENTIAL:
        return
    engines = config.explorer.rollout_model.engine_num
    tasks = -(-config.buffer.batch_size // engines)
    key = "explorer.runner_per_model"
    if not filler.is_set(key) and tasks < config.explorer.runner_per_model:
        filler.put(key, tasks, "a step has no more tasks for each engine")
