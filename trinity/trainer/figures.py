"""Figures of a process that trains: memory, and what its GPU can do at most."""

import resource
from collections.abc import Sequence

import psutil
import torch

_PEAK_TFLOPS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.5),
    ("H200 NVL", 835.5),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H200", 989.4),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A30", 165.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
)
"""Part of a GPU's name -> dense bf16, by its datasheet; what comes first counts."""


def peak_flops_of(gpu: str) -> float | None:
    """FLOPs a second that a GPU reaches at most in bf16; None for one that is not known.

    Of a slice of a GPU (MIG) it is not known either.
    """
    if "MIG" in gpu:
        return None
    words = f"{gpu.replace('-', ' ')} "
    return next((peak * 1e12 for name, peak in _PEAK_TFLOPS if f"{name} " in words), None)


def figures_of_process() -> dict[str, float]:
    """What `TrainEngine.health` tells of this process and its machine."""
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures = {
        "peak_memory_mb": peak_kb / 1024,
        "used_memory_mb": psutil.virtual_memory().used / 2**20,
    }
    if not torch.cuda.is_initialized():
        return figures
    figures["peak_gpu_memory_mb"] = torch.cuda.max_memory_allocated() / 2**20
    figures["peak_reserved_gpu_memory_mb"] = torch.cuda.max_memory_reserved() / 2**20
    peak = peak_flops_of(torch.cuda.get_device_name())
    return figures if peak is None else {**figures, "peak_flops": peak}


def figures_of_ranks(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Figures of several processes as those of one: the most memory of any, the FLOPs of all."""
    whole = {name: max(figures.get(name, 0.0) for figures in found) for name in found[0]}
    if "peak_flops" in whole:
        whole["peak_flops"] = sum(figures.get("peak_flops", 0.0) for figures in found)
    return whole
