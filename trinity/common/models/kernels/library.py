"""The compiled kernels, or other C++: built by this machine's compiler when first needed.

The result is kept in the user's cache folder, under a name that holds source, compiler flags and
processor: every kind of machine of a cluster gets its own. Without a compiler there are none, and
PyTorch's own operations do the work.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
_FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-march=native")
_LIMIT_S = 120
_log = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, compiled if they aren't yet; None where that fails, which is logged."""
    return load_compiled("CPU kernels", SOURCES, _FLAGS, included=_HEADERS)


def load_compiled(
    name: str,
    sources: Sequence[Path],
    flags: Sequence[str],
    *,
    included: Sequence[Path] = (),
    version: str = "",
) -> ctypes.CDLL | None:
    """A library, compiled unless it is there; None where that fails, which is logged.

    Args:
        name: What it is, for the log and for its file.
        included: Other files that it is made of.
        version: Of what else it depends on.
    """
    try:
        return ctypes.CDLL(str(_compiled(name, sources, flags, included, version)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        _log.warning(
            "The %s could not be compiled (%s): PyTorch's own are used, which take more time or "
            "memory. A C++ compiler (Debian: apt install g++) brings them.",
            name,
            " ".join(said.split())[:200],
        )
        return None


def _compiled(
    name: str, sources: Sequence[Path], flags: Sequence[str], included: Sequence[Path], version: str
) -> Path:
    compiler = _compiler()
    parts = [path.read_bytes() for path in (*sources, *included)]
    parts += [p.encode() for p in (compiler, *flags, version, platform.machine(), _processor())]
    key = hashlib.sha256(b"/".join(parts)).hexdigest()[:16]
    target = _folder() / f"{name.replace(' ', '-').lower()}-{key}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            command = [compiler, *map(str, sources), *flags, "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIMIT_S)
            made.replace(target)
    return target


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
