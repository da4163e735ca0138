"""Tensors as a safetensors file that may be read by whoever may read the folder it lies in."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write ``tensors``; the library's own file is for its owner alone (0600), model folders not.

    The bits are those of the folder: to ask for the umask is to set it, for all threads.
    """
    save_file(dict(tensors), path, metadata=dict(metadata or {}))
    with suppress(OSError):  # some mounts keep no such bits
        path.chmod(path.parent.stat().st_mode & 0o666)
