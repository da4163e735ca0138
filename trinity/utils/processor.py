"""What this machine's processor can do, for who does not load the kernels."""

import os
import shutil
from pathlib import Path

_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # the last as ARM's are called
_PRODUCTS = {"avx512_bf16", "avx512bw", "avx512vl"}
_TILES = "amx_bf16"
_COMPILERS = ("c++", "g++", "clang++")


def has_bfloat16() -> bool:
    """Whether there are instructions for it; True where Linux does not tell."""
    words = _words()
    return not words or bool(words & _BFLOAT16)


def has_own_products() -> bool:
    """Whether bfloat16 matrices are multiplied by kernels of ours, and so layers are joined.

    The kernels' source asks the compiler the same (`HAS_PRODUCTS`).
    """
    words = _words()
    asked = (os.environ.get("CXX"), *_COMPILERS)
    has_compiler = any(shutil.which(name) for name in asked if name)
    return words >= _PRODUCTS and _TILES not in words and has_compiler


def _words() -> set[str]:
    try:
        return set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return set()
