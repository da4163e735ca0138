"""What this machine's processor can do, for who does not load the kernels."""

import os
import shutil
from pathlib import Path

_PRODUCTS = {"avx512_bf16", "avx512bw", "avx512vl"}
_TILES = "amx_bf16"
_COMPILERS = ("c++", "g++", "clang++")


def has_own_products() -> bool:
    """Whether bfloat16 matrices are multiplied by kernels of ours, and so layers are joined.

    The kernels' source asks the compiler the same (`HAS_PRODUCTS`).
    """
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    asked = (os.environ.get("CXX"), *_COMPILERS)
    has_compiler = any(shutil.which(name) for name in asked if name)
    return words >= _PRODUCTS and _TILES not in words and has_compiler
