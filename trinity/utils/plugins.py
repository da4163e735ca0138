"""Imports the user's plugin folders: each file as a module of the package `trinity_plugins`.

Files may import each other (``from .other import x`` or ``from trinity_plugins.other import x``);
nothing is copied; a file that fails ends the load with its own traceback. Child processes find
the folders in ``TRINITY_PLUGIN_DIRS``.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

PLUGIN_DIRS_ENV = "TRINITY_PLUGIN_DIRS"
PACKAGE = "trinity_plugins"


class SameNameError(ValueError):
    """Two folders hold a plugin of the same name."""


def load_plugins(folders: Iterable[str | Path]) -> list[ModuleType]:
    """Import all plugin files of ``folders``. A folder or file loaded before is not loaded again.

    Raises:
        ValueError: A folder does not exist.
        SameNameError: Two folders hold a plugin of the same name.
        Exception: Whatever a plugin raises while it is imported.
    """
    paths = [Path(folder).expanduser().resolve() for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"The plugin folder {path} does not exist or is no folder.")
    package = _package()
    found: dict[str, Path] = {}
    for path in dict.fromkeys([*map(Path, package.__path__), *paths]):
        for name in plugin_names(path):
            if found.setdefault(name, path) != path:
                raise SameNameError(
                    f"Two plugins are called {name!r}, in {found[name]} and {path}; rename one."
                )
    package.__path__ = list(dict.fromkeys([*package.__path__, *map(str, paths)]))
    importlib.invalidate_caches()
    return [importlib.import_module(f"{PACKAGE}.{name}") for name in found]


def load_plugins_from_env() -> list[ModuleType]:
    """`load_plugins` of the folders in ``TRINITY_PLUGIN_DIRS``, separated by ``:`` or ``,``."""
    return load_plugins(plugin_dirs_from_env())


def plugin_dirs_from_env() -> list[str]:
    """The folders in ``TRINITY_PLUGIN_DIRS``."""
    text = os.environ.get(PLUGIN_DIRS_ENV, "")
    return [part for part in text.replace(",", os.pathsep).split(os.pathsep) if part.strip()]


def _package() -> ModuleType:
    if PACKAGE not in sys.modules:
        package = ModuleType(PACKAGE, "Plugins of the user.")
        package.__path__ = []
        sys.modules[PACKAGE] = package
    return sys.modules[PACKAGE]


def plugin_names(folder: Path) -> list[str]:
    """Files and packages of a folder, but those whose name starts with ``_`` or is a test."""
    entries = sorted(folder.iterdir())
    files = [entry.stem for entry in entries if entry.suffix == ".py"]
    packages = [entry.name for entry in entries if (entry / "__init__.py").is_file()]
    return [
        name
        for name in files + packages
        if name.isidentifier() and not name.startswith(("_", "test_")) and name != "conftest"
    ]
