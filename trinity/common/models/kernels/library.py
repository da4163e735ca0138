"""The compiled kernels, or other C++: built by this machine's compiler when first needed.

The result is kept in the user's cache folder, under a name that holds source, compiler flags and
processor: every kind of machine of a cluster gets its own. Without a compiler there are none, and
PyTorch's own operations do the work.

Run as a program it compiles what is missing, so that it is there when it is needed; it takes the
standard library only.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_LIMIT_S = 120
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """How a library is made.

    Args:
        name: What it is, for the log and for its file.
        included: Other files that it is made of.
        version: Of what else it depends on.
    """

    name: str
    sources: Sequence[Path]
    flags: Sequence[str]
    included: Sequence[Path] = ()
    version: str = ""


KERNELS = Recipe(
    "CPU kernels",
    tuple(sorted(_HERE.glob("*.cpp"))),
    ("-O3", "-std=c++17", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-march=native"),
    included=tuple(sorted(_HERE.glob("*.h"))),
)


def allocator() -> Recipe:
    """Of `trinity.common.models.allocator`; it is made for the PyTorch that is installed."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise FileNotFoundError("PyTorch is not installed")
    torch = Path(found.origin).parent
    paths = (f"-I{torch / 'include'}", f"-L{torch / 'lib'}", "-lc10")
    flags = ("-O2", "-std=c++20", "-shared", "-fPIC", *paths)
    version = importlib.metadata.version("torch")
    return Recipe("CPU allocator", (_HERE.parent / "allocator.cpp",), flags, version=version)


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, compiled if they aren't yet; None where that fails, which is logged."""
    return load_compiled(KERNELS)


@cache
def function(name: str, *arguments: type) -> Any:
    """A function of the kernels, which gives nothing, with the C types of its arguments."""
    found = library()
    assert found is not None, "who calls it has asked whether it is there"
    kernel = getattr(found, name)
    kernel.argtypes, kernel.restype = arguments, None
    return kernel


def load_compiled(recipe: Recipe) -> ctypes.CDLL | None:
    """A library, compiled unless it is there; None where that fails, which is logged."""
    try:
        return ctypes.CDLL(str(_compiled(recipe)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        _log.warning(
            "The %s could not be compiled (%s): PyTorch's own are used, which take more time or "
            "memory. A C++ compiler (Debian: apt install g++) brings them.",
            recipe.name,
            " ".join(said.split())[:200],
        )
        return None


def _compiled(recipe: Recipe) -> Path:
    compiler = _compiler()
    parts = [path.read_bytes() for path in (*recipe.sources, *recipe.included)]
    on = (compiler, *recipe.flags, recipe.version, platform.machine(), _processor())
    parts += [part.encode() for part in on]
    key = hashlib.sha256(b"/".join(parts)).hexdigest()[:16]
    target = _folder() / f"{recipe.name.replace(' ', '-').lower()}-{key}.so"
    if target.exists():
        return target
    with _alone(target):  # else several processes of a run would compile the same
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            command = [compiler, *map(str, recipe.sources), *recipe.flags, "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIMIT_S)
            made.replace(target)
    return target


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Wait until no other process makes ``target``, where the file system knows locks."""
    with target.with_suffix(".lock").open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise FileNotFoundError("no C++ compiler is installed")


def _processor() -> str:
    """What the processor can do, as far as Linux tells."""
    try:
        found = re.search(r"^(?:flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        return ""
    return found.group() if found else ""


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "trinity"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):
        folder = Path(tempfile.gettempdir()) / f"trinity-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder


def _compile_ahead() -> None:
    for recipe in (KERNELS, allocator()):
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # told when it is needed
            _compiled(recipe)


if __name__ == "__main__":
    _compile_ahead()
