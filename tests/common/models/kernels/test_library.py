"""How the kernels are compiled, and what happens where they can't be."""

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from trinity.common.models.kernels import library

PROGRAM = """
import torch
from trinity.common.models import kernels
x = torch.randn(4, 16)
print(kernels.rms_norm(x, torch.ones(16), 1e-5)[0].square().mean().item())
"""


def has_compiler():
    try:
        return bool(library._compiler())
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler is installed")
def test_many_at_once_make_one_whole_file(tmp_path, monkeypatch):
    whole = replace(library.KERNELS, flags=(*library.KERNELS.flags, "-O0"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        paths = set(pool.map(lambda _: library._compiled(whole), range(2)))
    assert len(paths) == 1
    assert list((tmp_path / "trinity").glob("*.so")) == list(paths)
    assert not [path for path in (tmp_path / "trinity").iterdir() if path.is_dir()]


def test_as_a_program_it_needs_no_pytorch(tmp_path):
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "CXX": ""}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-P", library.__file__],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stdout
    assert " torch" not in done.stderr and " trinity" not in done.stderr


def test_without_a_compiler_it_says_so_once_and_goes_on(tmp_path):
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "CXX": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert float(done.stdout) == pytest.approx(1, abs=1e-3)
    assert done.stderr.count("A C++ compiler (Debian: apt install g++) brings them") == 1


def test_what_the_compiler_says_is_told(tmp_path, monkeypatch, caplog):
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is not C++")
    monkeypatch.setattr(library, "KERNELS", replace(library.KERNELS, sources=(broken,)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert library.library.__wrapped__() is None
    assert "could not be compiled" in caplog.text
