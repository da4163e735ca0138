"""From the settings of a `TorchEngine` to what its worker runs."""

import logging
from typing import Any, NamedTuple

import psutil
import torch
from transformers import PreTrainedModel

from trinity.common.models.adapters import add_adapter_inplace
from trinity.common.models.allocator import use_tight_memory
from trinity.common.models.lean import make_lean_inplace
from trinity.common.models.loading import cast_parameters, end_of_sequence_ids, load_causal_lm
from trinity.common.models.routes import Routers
from trinity.engine.torch.attention import IMPLEMENTATION
from trinity.engine.torch.batcher import Batcher
from trinity.engine.torch.limits import Limits
from trinity.engine.torch.named import NamedAdapters
from trinity.engine.torch.packed_linear import pack_linears_inplace
from trinity.engine.torch.settings import TorchEngineSettings

_KV_SHARE = 0.4  # of the memory that is free once the model is loaded
_KEPT_SHARE = 0.25  # of that, for prompts that may be used again
_NAMED_SHARE = 0.5  # of both, for adapters beside the model, where there may be any


class Started(NamedTuple):
    """What an engine's worker runs. ``named`` is None where requests may name no adapter."""

    batcher: Batcher
    named: NamedAdapters | None
    max_model_len: int
    eos_ids: tuple[int, ...]
    vocabulary_size: int


def start(settings: TorchEngineSettings, log: logging.Logger) -> Started:
    """Load the model and the adapters, in the thread that will run them."""
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    if settings.device == "cpu":
        use_tight_memory()
    model, is_random = load_causal_lm(
        settings.model_path,
        settings.dtype,
        settings.init_seed,
        device=settings.device,
        attn_implementation=IMPLEMENTATION,
        trust_remote_code=settings.trust_remote_code,
        config_overrides=settings.config_overrides,
    )
    if is_random:
        log.warning(
            "%s holds no weights: initialised at random with seed %d.",
            settings.model_path,
            settings.init_seed,
        )
    limits, eos_ids = _limits(settings), end_of_sequence_ids(settings.model_path)
    named = _named(model, settings, limits, eos_ids)
    _prepare_inplace(model, settings)
    own = limits if named is None else limits.share(1 - _NAMED_SHARE)
    routers = Routers(model) if settings.returns_routes else None
    batcher = Batcher(model, own, eos_ids, routers)
    batcher.version = settings.version
    batcher.probe()
    allowed = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = settings.max_model_len or allowed or 4096
    embeddings: Any = model.get_input_embeddings()
    return Started(batcher, named, longest, eos_ids, embeddings.num_embeddings)


def _prepare_inplace(model: PreTrainedModel, settings: TorchEngineSettings) -> None:
    """Put the trained adapter on ``model``, and make it fast."""
    if settings.adapter is not None:
        dtype = next(model.parameters()).dtype
        add_adapter_inplace(model, settings.adapter)
        cast_parameters(model, dtype)
    if settings.device == "cpu":
        make_lean_inplace(model)
    # Packed weights lie in no parameter, which adapters beside the model would share.
    if settings.adapter is None and not settings.has_named_adapters:
        pack_linears_inplace(model, model.get_output_embeddings())


def _named(
    model: PreTrainedModel,
    settings: TorchEngineSettings,
    limits: Limits,
    eos_ids: tuple[int, ...],
) -> NamedAdapters | None:
    if not settings.has_named_adapters:
        return None
    num_at_start = len(settings.named_adapters)
    named = NamedAdapters(model, limits.share(_NAMED_SHARE), eos_ids, num_at_start)
    for adapter in settings.named_adapters:
        named.load(adapter, settings.version)
    return named


def _limits(settings: TorchEngineSettings) -> Limits:
    kv_bytes = settings.kv_cache_bytes or int(_free_memory(settings.device) * _KV_SHARE)
    return Limits(
        max_batch_tokens=settings.max_batch_tokens,
        max_running=settings.max_running,
        max_kv_bytes=kv_bytes,
        max_kept_bytes=int(kv_bytes * _KEPT_SHARE) if settings.enable_prefix_caching else 0,
        num_threads=torch.get_num_threads(),
    )


def _free_memory(device: str) -> int:
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(torch.device(device))[0]
    return int(psutil.virtual_memory().available)
