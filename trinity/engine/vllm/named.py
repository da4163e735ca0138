"""Adapters that vLLM has beside the weights that updates bring, and its settings for them."""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import vllm
from safetensors import SafetensorError
from vllm.config import lora as vllm_lora
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest

from trinity.common.config.nearest import nearest
from trinity.common.models.adapter_files import CONFIG, WEIGHTS, rank_in
from trinity.common.models.protocol import NamedAdapter
from trinity.engine.vllm.adapter import NUMBER, ServedAdapter
from trinity.engine.vllm.compat import adapters_on_cpu, refuse_what_no_cpu_has
from trinity.engine.vllm.settings import VLLMEngineSettings

_LATER_RANK = 16  # of adapters that come later, unless more is asked for: vLLM's own default
_OTHER_NAMES = {"target_modules": "lora_target_modules"}


@dataclass
class Loaded:
    """An adapter, what requests for it are sent with, and how many of them run."""

    adapter: NamedAdapter
    request: LoRARequest
    num_running: int = 0
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)


class NamedAdapters:
    """What requests for each of them are sent with.

    vLLM's workers read the files when an adapter is asked for, and again once others have pushed
    it out, and end if the files are not there: so they get copies, which nobody else removes.

    Lifecycle: ``meet`` -> ``add`` -> ``remove`` -> ``discard``, for each -> ``cleanup``.
    """

    def __init__(self, trained: ServedAdapter | None) -> None:
        self._trained = None if trained is None else trained.name
        self._by_name: dict[str, Loaded] = {}
        self._by_number: dict[int, Loaded] = {}
        self._numbers = itertools.count(NUMBER + 1)
        self._place: tempfile.TemporaryDirectory[str] | None = None

    @property
    def known(self) -> list[NamedAdapter]:
        """All that vLLM has, in the order in which they came."""
        return [loaded.adapter for loaded in self._by_name.values()]

    def meet(self, adapter: NamedAdapter) -> LoRARequest:
        """A request with which vLLM can load ``adapter``, under a number that no other ever had.

        Raises:
            ValueError: The name is taken, or the folder holds no adapter that can be served.
        """
        if adapter.name == self._trained:
            raise ValueError(f"The name {adapter.name!r} is taken by the adapter that is trained.")
        if adapter.name in self._by_name:
            raise ValueError(f"The adapter {adapter.name!r} is loaded already.")
        number = next(self._numbers)
        try:
            rank_in(Path(adapter.path))
            refuse_what_no_cpu_has(Path(adapter.path))
            return LoRARequest(adapter.name, number, str(self._copy(Path(adapter.path), number)))
        except (OSError, SafetensorError, ValueError) as error:
            raise cant_load(adapter, error) from error

    def add(self, adapter: NamedAdapter, request: LoRARequest) -> None:
        """vLLM has it."""
        loaded = Loaded(adapter, request)
        loaded.is_idle.set()
        self._by_name[adapter.name] = self._by_number[request.lora_int_id] = loaded

    def remove(self, name: str) -> Loaded:
        """No more requests for it; `LookupError` if there is none of that name."""
        if name not in self._by_name:
            raise LookupError(f"The engine has no adapter {name!r}.")
        return self._by_name.pop(name)

    def discard(self, request: LoRARequest) -> None:
        """vLLM has it no longer, or never had."""
        self._by_number.pop(request.lora_int_id, None)
        shutil.rmtree(request.lora_path, ignore_errors=True)

    def cleanup(self) -> None:
        """Remove the copies."""
        if self._place is not None:
            self._place.cleanup()

    def request(self, name: str) -> LoRARequest | None:
        """What a request for ``name`` is sent with; None if there is no such adapter."""
        loaded = self._by_name.get(name)
        return None if loaded is None else loaded.request

    @contextmanager
    def in_use(self, request: LoRARequest | None) -> Iterator[None]:
        """While this lasts, an adapter is not idle; others than these are passed over."""
        loaded = None if request is None else self._by_number.get(request.lora_int_id)
        if loaded is None:
            yield
            return
        loaded.num_running += 1
        loaded.is_idle.clear()
        try:
            yield
        finally:
            loaded.num_running -= 1
            if not loaded.num_running:
                loaded.is_idle.set()

    def _copy(self, folder: Path, number: int) -> Path:
        if self._place is None:
            self._place = tempfile.TemporaryDirectory(prefix="trinity_adapters_")
        copy = Path(self._place.name) / str(number)
        copy.mkdir()
        for name in (CONFIG, WEIGHTS):
            shutil.copyfile(folder / name, copy / name)
        return copy


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
