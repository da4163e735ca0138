"""`trinity log`: the logs of all parts of a job, as they are written."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from trinity.launcher.follow import Line

CONFIG = typer.Option(None, "--config", "-c", help="YAML file of the run.")
LOG_DIR = typer.Option(None, "--log-dir", "-d", help="Folder of the logs, instead of --config.")
KEYWORD = typer.Option("", "--keyword", "-k", help="Only lines that have this in them.")
LEVEL = typer.Option("INFO", "--level", "-l", help="Only lines of this level and above.")
LAST = typer.Option(0, "--last-n-lines", "-n", help="Lines of each file to begin with.")
PATTERN = typer.Option(
    None, "--search-pattern", "-p", help="Show what matches, with five lines around it, and end."
)
NO_COLOR = typer.Option(False, "--no-color", help="No colours.")
NO_FOLLOW = typer.Option(False, "--no-follow", help="End after the lines that are there.")

_EVERY_S = 0.5
_COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red")


def command(
    config: Path = CONFIG,
    log_dir: Path = LOG_DIR,
    keyword: str = KEYWORD,
    level: str = LEVEL,
    last_n_lines: int = LAST,
    search_pattern: str = PATTERN,
    no_color: bool = NO_COLOR,
    no_follow: bool = NO_FOLLOW,
) -> None:
    """Follow the logs of all parts of a job. Ends with Ctrl-C."""
    from trinity.cli.usage import UsageError
    from trinity.launcher.follow import LEVELS

    if level.upper() not in LEVELS:
        raise UsageError(f"--level is {level!r}; use one of {', '.join(LEVELS)}.")
    folder = log_dir or _folder_of(config)
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}: the job has not been started.")
    show = _shower(no_color)
    if search_pattern:
        _show_matches(folder, search_pattern, show)
    else:
        _follow(folder, last_n_lines, level.upper(), keyword, show, until_now=no_follow)


def _shower(no_color: bool) -> "Callable[[Line | None], None]":
    """Shows a line, in the color of its part; None: an empty one."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, no_color=no_color or None)
    colors: dict[str, str] = {}

    def show(line: "Line | None") -> None:
        if line is None:
            console.print()
            return
        color = colors.setdefault(line.source, _COLORS[len(colors) % len(_COLORS)])
        console.print(Text.assemble((f"{line.source}: ", color), line.text), soft_wrap=True)

    return show


def _show_matches(folder: Path, pattern: str, show: "Callable[[Line | None], None]") -> None:
    import re

    from trinity.cli.usage import UsageError
    from trinity.launcher.follow import search

    try:
        for block in search(folder, pattern):
            for line in [*block, None]:
                show(line)
    except re.error as error:
        text = f"--search-pattern is {pattern!r}, no regular expression: {error}."
        raise UsageError(text) from error


def _follow(
    folder: Path,
    last: int,
    level: str,
    keyword: str,
    show: "Callable[[Line | None], None]",
    *,
    until_now: bool,
) -> None:
    import time

    from trinity.launcher.follow import Follower, is_wanted

    follower = Follower(folder, last=last)
    while True:
        for line in follower.read():
            if is_wanted(line, level, keyword):
                show(line)
        if until_now:
            return
        time.sleep(_EVERY_S)


def _folder_of(config: Path | None) -> Path:
    from trinity.cli.usage import UsageError
    from trinity.common.config import load_config
    from trinity.common.config.case import cases_of

    if config is None:
        raise UsageError("Either --config or --log-dir must be provided.")
    folders = [Path(stage.config.log.save_dir) for stage in cases_of(load_config(config))]
    return folders[0] if len(folders) == 1 else folders[0].parent.parent
