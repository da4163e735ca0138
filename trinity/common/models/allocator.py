"""Memory of CPU tensors without the holes that PyTorch's allocator leaves in glibc's heap."""

from functools import cache

from trinity.common.models.kernels.library import allocator, load_compiled


@cache
def use_tight_memory() -> bool:
    """Have CPU tensors made from now on find their place where one of their size was freed.

    Whether that is so: it takes a compiler.
    """
    found = load_compiled(allocator())
    if found is not None:
        found.install()
    return found is not None
