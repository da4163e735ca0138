"""`trinity validate`: everything that is wrong with a file, at once and before anything starts."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from trinity.cli.config_file import ARGUMENTS, CONFIG, file_and_overrides
from trinity.cli.plugin_folders import PLUGIN_DIR, find_plugin_folders

if TYPE_CHECKING:
    from trinity.common.config import Config


def command(
    arguments: list[str] = ARGUMENTS,
    config: Path = CONFIG,
    plugin_dir: list[Path] = PLUGIN_DIR,
) -> None:
    """Show all that is wrong with a file. Starts nothing; exit code 2 if anything is."""
    from trinity.buffer.first_step import first_step_problems
    from trinity.common.config.advice import advice_of
    from trinity.common.config.unread import find_unread
    from trinity.common.config.validate import validate_file
    from trinity.common.errors import ConfigError

    file, overrides = file_and_overrides(config, arguments)
    loaded, problems, cases = validate_file(file, overrides, find_plugin_folders(plugin_dir))
    for warning in loaded.source.warnings if loaded else ():
        typer.echo(f"note: {warning}", err=True)
    if not problems:
        problems = [found for case in cases for found in first_step_problems(case.config)]
    if problems or loaded is None:
        raise ConfigError(problems, str(file))
    for problem in find_unread(loaded):
        typer.echo(f"note: {problem.key}: {problem.message} `trinity run` refuses it.", err=True)
    for advice in advice_of(cases):
        typer.echo(f"advice: {advice}", err=True)
    shown = [_what(case.config) for case in cases]
    if loaded.stages:
        pairs = zip(loaded.stages, shown, strict=True)
        shown = [f"stage {stage.stage_name} ({what})" for stage, what in pairs]
    typer.echo(f"{file} is valid: {', '.join(shown)}.")


def _what(config: "Config") -> str:
    """What it runs; a bench trains with no algorithm."""
    from trinity.common.constants import Mode

    trained = "" if config.mode is Mode.BENCH else f", {config.algorithm.algorithm_type}"
    return f"mode {config.mode}{trained}"
