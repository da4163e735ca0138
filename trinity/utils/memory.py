"""Memory of this process that is free but not given back."""

import ctypes
from functools import cache
from typing import Any


def release_free_memory() -> None:
    """Give the pages of freed memory back to the system, where the C library can (glibc)."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:  # a function of the C library, or None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
