"""RunPlan -> inference engines, each in a process of its own, and how to talk to them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from trinity.common.config import Config, InferenceModelConfig
from trinity.common.constants import EngineType, Mode
from trinity.common.models import ModelSettings
from trinity.common.models.protocol import InferenceEngine
from trinity.engine import make_engine
from trinity.engine.openai.settings import OpenAIEngineSettings
from trinity.engine.tinker.settings import TinkerEngineSettings
from trinity.engine.torch.settings import TorchEngineSettings
from trinity.engine.vllm.settings import VLLMEngineSettings
from trinity.launcher.adapter import adapter_settings, named_adapters
from trinity.launcher.gpu_needs import engine_gpus
from trinity.launcher.plan import RunPlan, rope_overrides
from trinity.launcher.tinker import tinker_service
from trinity.utils import actor

_MAX_RESTARTS = 3  # of an engine that dies; one more death ends the run


@dataclass(frozen=True)
class Served:
    """One model as workflows see it: its engines, and how to talk to it."""

    engines: Sequence[InferenceEngine]
    settings: ModelSettings


def serve(plan: RunPlan, model: InferenceModelConfig, name: str) -> Served:
    """Start the engines of ``model``, named ``name`` and a number. Nothing is loaded yet."""
    engines = [
        _spawn_engine(plan, model, index, f"{name}_{index}") for index in range(model.engine_num)
    ]
    return Served(engines, model_settings(plan.config, model))


def torch_settings(
    config: Config, model: InferenceModelConfig, cores: int, device: str
) -> TorchEngineSettings:
    """What the embedded engine is told of a model."""
    return TorchEngineSettings(
        model_path=model.model_path or config.model.model_path,
        dtype=model.dtype,
        seed=model.seed,
        init_seed=config.seed,
        max_model_len=model.max_model_len,
        num_threads=cores,
        enable_prefix_caching=model.enable_prefix_caching,
        update_mode=model.update_mode,
        device=device,
        trust_remote_code=model.trust_remote_code,
        config_overrides=rope_overrides(model),
        adapter=adapter_settings(config) if model.enable_lora else None,
        named_adapters=named_adapters(model),
        loads_adapters=model.enable_runtime_lora_updating,
        returns_routes=model.enable_return_routed_experts,
    )


def _openai_settings(config: Config, model: InferenceModelConfig) -> OpenAIEngineSettings:
    service = model.external_model_config
    return OpenAIEngineSettings(
        model=service.model_name or model.model_path or config.model.model_path,
        base_url_env=service.base_url_env,
        api_key_env=service.api_key_env,
        max_retries=service.max_retries,
        max_requests_per_minute=service.max_requests_per_minute,
        max_concurrent=service.max_concurrent_requests,
    )


def tinker_settings(config: Config, model: InferenceModelConfig) -> TinkerEngineSettings:
    """What an engine at the Tinker service is told of a model."""
    path = model.model_path or config.model.model_path
    is_trained = model is config.explorer.rollout_model
    return TinkerEngineSettings(
        tinker_service(config, None if is_trained else path),
        tokenizer_path=path,
        max_model_len=model.max_model_len,
        seed=model.seed,
        keeps_temperature=is_trained and config.mode is Mode.SERVE,
    )


def _engine_of(plan: RunPlan, model: InferenceModelConfig, name: str) -> tuple[str, object]:
    """Type and settings of the engine ``name`` that a model runs on."""
    if model.engine_type is EngineType.OPENAI:
        settings: object = _openai_settings(plan.config, model)
    elif model.engine_type is EngineType.VLLM:
        settings = _vllm_settings(plan, model, name)
    elif model.engine_type is EngineType.TINKER:
        settings = tinker_settings(plan.config, model)
    else:
        settings = torch_settings(plan.config, model, plan.cores, plan.device)
    return str(model.engine_type), settings


def _vllm_settings(plan: RunPlan, model: InferenceModelConfig, name: str) -> VLLMEngineSettings:
    names = (
        "dtype",
        "seed",
        "max_model_len",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "enable_expert_parallel",
        "gpu_memory_utilization",
        "enforce_eager",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "update_mode",
        "enable_log_requests",
        "trust_remote_code",
        "extra_engine_args",
    )
    return VLLMEngineSettings(
        model_path=model.model_path or plan.config.model.model_path,
        init_seed=plan.config.seed,
        sleeps=plan.is_colocated,
        returns_routes=model.enable_return_routed_experts,
        keeps_seeds=plan.gpus.total == 0,  # a draw for each request would take most of a GPU's time
        config_overrides=rope_overrides(model),
        adapter=adapter_settings(plan.config) if model.enable_lora else None,
        max_cpu_loras=plan.config.model.max_cpu_loras,
        fully_sharded_loras=plan.config.model.fully_sharded_loras,
        named_adapters=named_adapters(model),
        loads_adapters=model.enable_runtime_lora_updating,
        lora_kwargs=model.lora_kwargs,
        name=name,
        **{field: getattr(model, field) for field in names},
    )


def _spawn_engine(
    plan: RunPlan, model: InferenceModelConfig, index: int, name: str
) -> InferenceEngine:
    """The engine in a process of its own, with the OpenAI API beside it if that is asked for."""
    kind, settings = _engine_of(plan, model, name)
    num_gpus = engine_gpus(model) if plan.gpus.total and not plan.is_colocated else 0
    env_vars = plan.env_on(index * engine_gpus(model), engine_gpus(model))
    asks_for_api = model is plan.config.explorer.rollout_model and model.enable_openai_api
    make: Callable[[], InferenceEngine] = partial(make_engine, kind, settings)
    if model.base_port is not None or asks_for_api:
        from trinity.engine.served import ServedEngine

        make = partial(
            ServedEngine,
            make,
            model_settings(plan.config, model),
            port=0 if model.base_port is None else model.base_port + index,
            api_key=None if model.api_key == "EMPTY" else model.api_key,
        )
    return actor.spawn(
        make,
        name=name,
        namespace=plan.namespace,
        num_gpus=num_gpus,
        env_vars=env_vars,
        max_restarts=_MAX_RESTARTS,
    )


def model_settings(config: Config, model: InferenceModelConfig) -> ModelSettings:
    """What a wrapper is told of a model."""
    names = (
        "temperature",
        "top_p",
        "top_k",
        "max_model_len",
        "max_prompt_tokens",
        "max_response_tokens",
        "min_response_tokens",
        "enable_prompt_truncation",
        "repetition_penalty",
        "chat_template",
        "enable_thinking",
        "enable_multimodal",
        "enable_history",
        "ignore_eos",
        "enable_openai_api",
        "enable_auto_tool_choice",
        "tool_call_parser",
        "reasoning_parser",
        "trust_remote_code",
    )
    given = {name: getattr(model, name) for name in names}
    path = model.model_path or config.model.model_path
    adapter = adapter_settings(config) if model.enable_lora else None
    return ModelSettings(
        model_path=path,
        name=model.name or path,
        gives_tokens=model.engine_type is not EngineType.OPENAI,
        adapter=None if adapter is None else adapter.name,
        has_named_adapters=bool(model.lora_modules) or model.enable_runtime_lora_updating,
        loads_adapters=model.enable_runtime_lora_updating,
        **{name: value for name, value in given.items() if value is not None},
    )
