import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity.utils import plugins

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fresh():
    """A process in which no plugin was loaded yet, as far as tests can have one."""
    kept = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == plugins.PACKAGE}
    for name in kept:
        del sys.modules[name]
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == plugins.PACKAGE]:
        del sys.modules[name]
    sys.modules.update(kept)


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_files_may_import_each_other_in_any_order(fresh, tmp_path):
    folder = write(
        tmp_path,
        a_first="from .z_last import VALUE\nDOUBLE = 2 * VALUE",
        z_last="VALUE = 21",
        by_name="from trinity_plugins.z_last import VALUE",
        _private="raise RuntimeError('not a plugin')",
        test_a="raise RuntimeError('not a plugin')",
    )
    before = sorted(folder.iterdir())
    modules = {m.__name__: m for m in plugins.load_plugins([folder])}
    assert sorted(modules) == [f"trinity_plugins.{n}" for n in ("a_first", "by_name", "z_last")]
    assert modules["trinity_plugins.a_first"].DOUBLE == 42
    assert [p for p in sorted(folder.iterdir()) if p.name != "__pycache__"] == before
    again = plugins.load_plugins([folder, str(folder)])
    assert [m for m in again if m is not modules[m.__name__]] == []


def test_several_folders_share_the_package(fresh, tmp_path):
    first, second = tmp_path / "one", tmp_path / "two"
    first.mkdir(), second.mkdir()
    write(first, tools="def double(x): return 2 * x")
    write(second, mine="from .tools import double\nFOUR = double(2)")
    assert plugins.load_plugins([first, second])[-1].FOUR == 4
    write(second, tools="")
    with pytest.raises(ValueError, match="Two plugins are called 'tools'"):
        plugins.load_plugins([first, second])


def test_a_failing_plugin_shows_its_own_line(fresh, tmp_path):
    write(tmp_path, broken="x = 1\nraise KeyError('my mistake')")
    with pytest.raises(KeyError, match="my mistake") as caught:
        plugins.load_plugins([tmp_path])
    assert caught.traceback[-1].path == tmp_path / "broken.py"
    assert caught.traceback[-1].lineno == 1


def test_a_missing_folder_is_an_error(fresh, tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        plugins.load_plugins([tmp_path / "nowhere"])


def test_other_processes_find_the_folders_in_the_environment(tmp_path):
    write(tmp_path, mine="print('loaded', __name__)")
    code = "from trinity.utils.plugins import load_plugins_from_env as l; l()"
    env = {**os.environ, plugins.PLUGIN_DIRS_ENV: str(tmp_path), "PYTHONPATH": str(ROOT)}
    shown = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert shown.stdout == "loaded trinity_plugins.mine\n"
