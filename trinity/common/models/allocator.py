"""Memory of CPU tensors without the holes that PyTorch's allocator leaves in glibc's heap."""

from functools import cache
from pathlib import Path

import torch

from trinity.common.models.kernels.library import load_compiled

_FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC")


@cache
def use_tight_memory() -> bool:
    """Have CPU tensors made from now on find their place where one of their size was freed.

    Whether that is so: it takes a compiler.
    """
    package = Path(torch.__file__).parent
    flags = (*_FLAGS, f"-I{package / 'include'}", f"-L{package / 'lib'}", "-lc10")
    source = Path(__file__).with_suffix(".cpp")
    found = load_compiled("CPU allocator", [source], flags, version=torch.__version__)
    if found is not None:
        found.install()
    return found is not None
