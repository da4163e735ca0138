"""From the settings of a `VLLMEngine` to a running `AsyncLLM`."""

import os
import tempfile
from logging import Logger
from pathlib import Path
from typing import Any

from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from trinity.common.models.loading import has_weights, load_causal_lm, load_tokenizer
from trinity.engine.vllm.adapter import ServedAdapter
from trinity.engine.vllm.causes import telling_the_first_cause
from trinity.engine.vllm.compat import choose_model_runner, own_scheduler, seeds_on_cpu
from trinity.engine.vllm.memory import explaining_failure
from trinity.engine.vllm.named import adapter_arguments, take_turns
from trinity.engine.vllm.settings import VLLMEngineSettings
from trinity.engine.vllm.transfer import BACKEND, EXTENSION

_CPU_CACHE_BYTES = 2**30


class ModelFolder:
    """Where vLLM loads a model from: the folder itself, or one with random weights in its place.

    Lifecycle: ``path`` any number of times -> ``cleanup``.
    """

    def __init__(self, settings: VLLMEngineSettings, log: Logger) -> None:
        self._settings, self._log = settings, log
        self._made: tempfile.TemporaryDirectory[str] | None = None

    def path(self) -> str:
        """The model's folder; one with random weights if it has none."""
        settings = self._settings
        if not Path(settings.model_path).is_dir() or has_weights(settings.model_path):
            return settings.model_path
        if self._made is not None:
            return self._made.name
        self._log.warning(
            "%s holds no weights: initialised at random with seed %d.",
            settings.model_path,
            settings.init_seed,
        )
        self._made = tempfile.TemporaryDirectory(prefix="trinity_model_")
        model, _ = load_causal_lm(settings.model_path, settings.dtype, settings.init_seed)
        model.save_pretrained(self._made.name)
        load_tokenizer(settings.model_path).save_pretrained(self._made.name)
        return self._made.name

    def cleanup(self) -> None:
        """Remove what was made."""
        if self._made is not None:
            self._made.cleanup()


def start_llm(settings: VLLMEngineSettings, path: str, trained: ServedAdapter | None) -> AsyncLLM:
    """Start vLLM's processes on the model in ``path``."""
    # vLLM forks otherwise where it can, which threads of this process would not survive.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    choose_model_runner(settings)
    given = _engine_args(settings, path) | adapter_arguments(settings, trained)
    given |= settings.extra_engine_args
    with explaining_failure(settings), telling_the_first_cause():
        arguments = AsyncEngineArgs(**given)
        return AsyncLLM.from_engine_args(arguments, usage_context=_usage())


def _engine_args(settings: VLLMEngineSettings, path: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": path,
        "tokenizer": settings.model_path,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "data_parallel_size": settings.data_parallel_size,
        "enable_expert_parallel": settings.enable_expert_parallel,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enable_chunked_prefill": settings.enable_chunked_prefill,
        "enable_log_requests": settings.enable_log_requests,
        "trust_remote_code": settings.trust_remote_code,
        "hf_overrides": dict(settings.config_overrides),
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        "enable_sleep_mode": settings.sleeps,
    }
    cache = settings.kv_cache_bytes
    if cache is None and current_platform.is_cpu():
        cache = _CPU_CACHE_BYTES
    if cache is not None:
        arguments["kv_cache_memory_bytes"] = cache
    if settings.returns_routes:
        arguments["enable_return_routed_experts"] = True
    # Our scheduler sees to it that requests are served, but not that adapters take turns, nor to
    # what vLLM's own keeps of each token's routes.
    is_own = not (take_turns(settings) or settings.returns_routes)
    scheduler = own_scheduler() if is_own else {}
    return arguments | scheduler | seeds_on_cpu(settings)


def _usage() -> UsageContext:
    """How many requests vLLM runs at a time goes by what it is used for; by itself it is 128."""
    is_cpu = current_platform.is_cpu()
    return UsageContext.ENGINE_CONTEXT if is_cpu else UsageContext.OPENAI_API_SERVER
