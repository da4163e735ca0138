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
    from trinity.common.config import derive
    from trinity.common.config.advice import find_advice
    from trinity.common.config.stages import iterate_stages
    from trinity.common.config.unread import find_unread
    from trinity.common.config.validate import validate_file
    from trinity.common.errors import ConfigError

    file, overrides = file_and_overrides(config, arguments)
    loaded, problems = validate_file(file, overrides, find_plugin_folders(plugin_dir))
    for warning in loaded.source.warnings if loaded else ():
        typer.echo(f"note: {warning}", err=True)
    if loaded is not None and not problems:
        stages = [derive(stage.config).config for stage in iterate_stages(loaded)]
        problems = [problem for stage in stages for problem in first_step_problems(stage)]
    if problems or loaded is None:
        raise ConfigError(problems, str(file))
    for problem in find_unread(loaded):
        typer.echo(f"note: {problem.key}: {problem.message} `trinity run` refuses it.", err=True)
    for advice in find_advice(loaded):
        typer.echo(f"advice: {advice}", err=True)
    typer.echo(f"{file} is valid: {_what(loaded)}.")


def _what(loaded: "Config") -> str:
    """What it runs; a bench trains with no algorithm."""
    from trinity.common.constants import Mode

    if loaded.stages:
        names = ", ".join(stage.stage_name for stage in loaded.stages)
        return f"mode {loaded.mode}, stages {names}"
    trained = "" if loaded.mode is Mode.BENCH else f", {loaded.algorithm.algorithm_type}"
    return f"mode {loaded.mode}{trained}"
