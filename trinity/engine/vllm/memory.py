"""What an engine says when its GPU has no room for it: the setting to change, and to what."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trinity.common.config.shape import find_shape
from trinity.common.errors import TrinityError
from trinity.engine.vllm.settings import VLLMEngineSettings

_KEY = "explorer.rollout_model"
_GIB = 2**30
_OVERHEAD = 2 * _GIB  # activations of a prefill, CUDA graphs, the driver
_WIDTHS = {"float32": 4}
_LEAST_TOKENS = 16  # of a sequence that is worth naming
_MOST = 0.95  # of a GPU


class EngineMemoryError(TrinityError):
    """vLLM found too little memory on its GPU."""


@dataclass(frozen=True)
class GPUMemory:
    """Of the first GPU that this process sees, in bytes."""

    free: int
    total: int


def gpu_memory() -> GPUMemory | None:
    """As the driver tells it, so that this process need not open the GPU; None if it does not."""
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import import_pynvml

    if not current_platform.is_cuda():
        return None
    nvml = import_pynvml()
    nvml.nvmlInit()
    try:
        number = current_platform.device_id_to_physical_device_id(0)
        found = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(number))
        return GPUMemory(int(found.free), int(found.total))
    finally:
        nvml.nvmlShutdown()


def too_little_free(settings: VLLMEngineSettings, memory: GPUMemory) -> str | None:
    """What to do if others hold what the engine is to get; None if they don't."""
    share = settings.gpu_memory_utilization * memory.total
    if share <= memory.free:
        return None
    most = math.floor(100 * memory.free / memory.total) / 100
    return (
        f"{_KEY}.gpu_memory_utilization is {settings.gpu_memory_utilization}: that is "
        f"{share / _GIB:.1f} GiB, but others hold {(memory.total - memory.free) / _GIB:.1f} of the "
        f"GPU's {memory.total / _GIB:.1f}. Lower it to {most}, or end what else runs on the GPU."
    )


def too_small(settings: VLLMEngineSettings, memory: GPUMemory) -> str | None:
    """What to change if weights and one longest sequence exceed the engine's share of a GPU.

    None if they don't, or if the model's size is not known.
    """
    shape = find_shape(settings.model_path)
    if shape is None:
        return None
    share = settings.gpu_memory_utilization * memory.total
    width = _WIDTHS.get(settings.dtype, 2)
    parts = settings.tensor_parallel_size * settings.pipeline_parallel_size
    weights = shape.parameters * width / parts
    token = 2 * shape.layers * shape.kv * width / parts
    longest = settings.max_model_len or 1
    room = share - weights - _OVERHEAD
    if room >= token * longest:
        return None
    ways = [f"raise tensor_parallel_size from {settings.tensor_parallel_size}"]
    if room > _LEAST_TOKENS * token:
        ways.insert(0, f"lower max_model_len from {longest} to {int(room / token)}")
    needed = math.ceil(100 * (share - room + token * longest) / memory.total) / 100
    if needed <= _MOST:
        ways.insert(0, f"raise gpu_memory_utilization to {needed}")
    return (
        f"{_KEY}.gpu_memory_utilization is {settings.gpu_memory_utilization}: that is "
        f"{share / _GIB:.1f} GiB of the GPU. The weights take {weights / _GIB:.1f}, running them "
        f"about {_OVERHEAD / _GIB:.0f}, and one sequence of {longest} tokens "
        f"{token * longest / _GIB:.2f}. To make it fit, {', or '.join(ways)}."
    )


@contextmanager
def explaining_failure(settings: VLLMEngineSettings) -> Iterator[None]:
    """Start vLLM within; a GPU that has too little memory is an `EngineMemoryError`.

    What others hold is looked at before: vLLM would be minutes in finding out.
    """
    memory = gpu_memory()
    if memory is not None and (found := too_little_free(settings, memory)):
        raise EngineMemoryError(found)
    try:
        yield
    except Exception as error:  # vLLM raises all kinds, and prints the cause in its own process
        if memory is None or not (found := too_small(settings, memory)):
            raise
        raise EngineMemoryError(f"{found} vLLM says: {error}") from error
