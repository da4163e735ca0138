"""`trinity validate`: everything that is wrong with a file, at once and before anything starts."""

from pathlib import Path

import typer

from trinity.cli.config_file import ARGUMENTS, CONFIG, file_and_overrides
from trinity.cli.plugin_folders import PLUGIN_DIR, find_plugin_folders


def command(
    arguments: list[str] = ARGUMENTS,
    config: Path = CONFIG,
    plugin_dir: list[Path] = PLUGIN_DIR,
) -> None:
    """Show all that is wrong with a file. Starts nothing; exit code 2 if anything is."""
    from trinity.common.config.advice import find_advice
    from trinity.common.config.unread import find_unread
    from trinity.common.config.validate import validate_file
    from trinity.common.errors import ConfigError

    file, overrides = file_and_overrides(config, arguments)
    loaded, problems = validate_file(file, overrides, find_plugin_folders(plugin_dir))
    for warning in loaded.source.warnings if loaded else ():
        typer.echo(f"note: {warning}", err=True)
    if problems or loaded is None:
        raise ConfigError(problems, str(file))
    for problem in find_unread(loaded):
        typer.echo(f"note: {problem.key}: {problem.message} `trinity run` refuses it.", err=True)
    for advice in find_advice(loaded):
        typer.echo(f"advice: {advice}", err=True)
    stages = ", ".join(stage.stage_name for stage in loaded.stages)
    what = f"stages {stages}" if stages else f"{loaded.algorithm.algorithm_type}"
    typer.echo(f"{file} is valid: mode {loaded.mode}, {what}.")
