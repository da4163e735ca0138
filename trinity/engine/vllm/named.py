"""Adapters that vLLM has beside the weights that updates bring, and its settings for them."""

import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import vllm
from safetensors import SafetensorError
from vllm.config import lora as vllm_lora
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest

from trinity.common.config.nearest import nearest
from trinity.common.models.adapter_files import rank_in
from trinity.common.models.protocol import NamedAdapter
from trinity.engine.vllm.adapter import NUMBER, ServedAdapter
from trinity.engine.vllm.compat import adapters_on_cpu, refuse_what_no_cpu_has
from trinity.engine.vllm.settings import VLLMEngineSettings

_LATER_RANK = 16  # of adapters that come later, unless more is asked for: vLLM's own default
_OTHER_NAMES = {"target_modules": "lora_target_modules"}


class NamedAdapters:
    """What requests for each of them are sent with; vLLM's workers read the files when asked."""

    def __init__(self, trained: ServedAdapter | None) -> None:
        self._trained = None if trained is None else trained.name
        self._known: dict[str, NamedAdapter] = {}
        self._requests: dict[str, LoRARequest] = {}
        self._numbers = itertools.count(NUMBER + 1)

    @property
    def known(self) -> list[NamedAdapter]:
        """All that vLLM has, in the order in which they came."""
        return list(self._known.values())

    def meet(self, adapter: NamedAdapter) -> LoRARequest:
        """A request with which vLLM can load ``adapter``, under a number that no other ever had.

        Raises:
            ValueError: The name is taken, or the folder holds no adapter that can be served.
        """
        if adapter.name == self._trained:
            raise ValueError(f"The name {adapter.name!r} is taken by the adapter that is trained.")
        if adapter.name in self._known:
            raise ValueError(f"The adapter {adapter.name!r} is loaded already.")
        try:
            rank_in(Path(adapter.path))
            refuse_what_no_cpu_has(Path(adapter.path))
        except (OSError, SafetensorError, ValueError) as error:
            raise cant_load(adapter, error) from error
        return LoRARequest(adapter.name, next(self._numbers), adapter.path)

    def add(self, adapter: NamedAdapter, request: LoRARequest) -> None:
        """vLLM has it."""
        self._known[adapter.name], self._requests[adapter.name] = adapter, request

    def remove(self, name: str) -> LoRARequest:
        """`LookupError` if there is none of that name."""
        if name not in self._known:
            raise LookupError(f"The engine has no adapter {name!r}.")
        del self._known[name]
        return self._requests.pop(name)

    def request(self, name: str) -> LoRARequest | None:
        """What a request for ``name`` is sent with; None if there is no such adapter."""
        return self._requests.get(name)


def cant_load(adapter: NamedAdapter, error: Exception) -> ValueError:
    """What is told of an adapter that vLLM, or we, refuse."""
    return ValueError(f"The adapter {adapter.name!r} can't be loaded: {error}")


def adapter_arguments(
    settings: VLLMEngineSettings, trained: ServedAdapter | None
) -> dict[str, Any]:
    """What vLLM is told of adapters at its start; nothing if there will be none.

    Raises:
        ValueError: A rank is beyond vLLM's, or it has no setting of a name in ``lora_kwargs``.
    """
    if trained is None and not settings.has_named_adapters:
        return {}
    ranks = [] if trained is None else [(trained.rank, "model.lora_configs.0.lora_rank")]
    ranks += [(rank_in(Path(a.path)), f"The rank in {a.path}") for a in settings.named_adapters]
    ranks += [(_LATER_RANK, "")] if settings.loads_adapters else []
    given: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": max(num_at_start(settings), 1),
        "max_lora_rank": _room_for(*max(ranks)),
        "max_cpu_loras": settings.max_cpu_loras,
        "fully_sharded_loras": settings.fully_sharded_loras,
    }
    given |= adapters_on_cpu(settings)
    return given | {_setting(name): value for name, value in settings.lora_kwargs.items()}


def num_at_start(settings: VLLMEngineSettings) -> int:
    """Adapters that the engine starts with: the one that is trained, and those beside it."""
    return len(settings.named_adapters) + (settings.adapter is not None)


def take_turns(settings: VLLMEngineSettings) -> bool:
    """Whether there may be more adapters than vLLM computes with in one step."""
    at_a_time = settings.lora_kwargs.get("max_loras", num_at_start(settings))
    return settings.loads_adapters or at_a_time < num_at_start(settings)


def _setting(name: str) -> str:
    known = {field.name for field in fields(AsyncEngineArgs)}
    wanted = _OTHER_NAMES.get(name, name)
    if wanted in known:
        return wanted
    close = nearest(name, [other for other in known if "lora" in other])
    hint = f" Did you mean {close!r}?" if close else ""
    raise ValueError(
        f"explorer.rollout_model.lora_kwargs has {name!r}, which vLLM {vllm.__version__} has no "
        f"setting for.{hint}"
    )


def _room_for(rank: int, what: str) -> int:
    """The least of vLLM's sizes that holds an adapter of ``rank``."""
    sizes = sorted(get_args(vllm_lora.MaxLoRARanks))
    for size in sizes:
        if rank <= size:
            return int(size)
    raise ValueError(
        f"{what} is {rank}, and vLLM serves adapters of at most {sizes[-1]}. Lower it, or set "
        "explorer.rollout_model.engine_type to torch."
    )
