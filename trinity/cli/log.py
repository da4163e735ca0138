"""`trinity log`: the logs of all parts of a job, as they are written."""

from pathlib import Path

import typer

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
    import re
    import time

    from rich.console import Console
    from rich.text import Text

    from trinity.cli.usage import UsageError
    from trinity.launcher.follow import LEVELS, Follower, Line, is_wanted, search

    if level.upper() not in LEVELS:
        raise UsageError(f"--level is {level!r}; use one of {', '.join(LEVELS)}.")
    folder = log_dir or _folder_of(config)
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}: the job has not been started.")
    console = Console(highlight=False, no_color=no_color or None)
    colors: dict[str, str] = {}

    def show(line: Line) -> None:
        color = colors.setdefault(line.source, _COLORS[len(colors) % len(_COLORS)])
        console.print(Text.assemble((f"{line.source}: ", color), line.text), soft_wrap=True)

    if search_pattern:
        try:
            for block in search(folder, search_pattern):
                for line in block:
                    show(line)
                console.print()
        except re.error as error:
            text = f"--search-pattern is {search_pattern!r}, no regular expression: {error}."
            raise UsageError(text) from error
        return
    follower = Follower(folder, last=last_n_lines)
    while True:
        for line in follower.read():
            if is_wanted(line, level.upper(), keyword):
                show(line)
        if no_follow:
            return
        time.sleep(_EVERY_S)


def _folder_of(config: Path | None) -> Path:
    from trinity.cli.usage import UsageError
    from trinity.common.config import derive, iterate_stages, load_config

    if config is None:
        raise UsageError("Either --config or --log-dir must be provided.")
    stages = [derive(stage).config for _, stage in iterate_stages(load_config(config))]
    folders = [Path(stage.log.save_dir) for stage in stages]
    return folders[0] if len(folders) == 1 else folders[0].parent.parent
