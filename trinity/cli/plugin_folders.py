"""The plugins that a command is given: its option, and errors that tell what to do about them."""

import ast
import importlib
from collections.abc import Iterable
from pathlib import Path

import typer

from trinity.cli.usage import UsageError
from trinity.common.errors import TrinityError
from trinity.utils import plugins
from trinity.utils.frames import traceback_without

PLUGIN_DIR = typer.Option(None, "--plugin-dir", help="Folder of your plugins; may be repeated.")

_IMPORTING = (plugins.__file__, importlib.__file__)


class BrokenPluginError(TrinityError):
    """A plugin raises while it is imported."""


def find_plugin_folders(asked: Iterable[str | Path] | None) -> list[str]:
    """The folders after ``--plugin-dir``; where there are none, those of ``TRINITY_PLUGIN_DIRS``.

    Raises:
        UsageError: A folder is missing, or a plugin in it is no Python. Nothing was run.
    """
    named, source = list(asked or ()), "the path after --plugin-dir"
    if not named:
        named, source = list(plugins.plugin_dirs_from_env()), plugins.PLUGIN_DIRS_ENV
    folders = [Path(folder).expanduser().resolve() for folder in named]
    for folder in folders:
        if folder.is_file():
            raise UsageError(f"{folder} is a file. Name its folder after --plugin-dir.")
        if not folder.is_dir():
            raise UsageError(f"There is no plugin folder {folder}. Correct {source}.")
        for name in plugins.plugin_names(folder):
            _check_syntax(folder / f"{name}.py")
    return [str(folder) for folder in folders]


def load_plugin_folders(asked: Iterable[str | Path] | None) -> list[str]:
    """`find_plugin_folders`, and import all plugins in them.

    Raises:
        UsageError: As there, or two plugins have the same name.
        BrokenPluginError: A plugin raises; the text has its own frames.
    """
    folders = find_plugin_folders(asked)
    try:
        plugins.load_plugins(folders)
    except plugins.SameNameError as error:
        raise UsageError(str(error)) from error
    except Exception as error:
        shown = traceback_without(error, _imports)
        raise BrokenPluginError(f"A plugin can't be imported.\n{shown}".rstrip()) from error
    return folders


def _check_syntax(path: Path) -> None:
    if not path.is_file():
        return  # the plugin is a package
    try:
        ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) else ""
        what = error.msg if isinstance(error, SyntaxError) else error
        raise UsageError(f"The plugin {path} is no Python: {line}{what}") from error


def _imports(file: str) -> bool:
    """Whether frames of ``file`` only import."""
    return file in (*_IMPORTING, __file__) or file.startswith("<frozen importlib")
