"""`trinity validate`: everything that is wrong with a file, at once and before anything starts."""

from pathlib import Path

import typer

from trinity.cli.plugin_folders import PLUGIN_DIR, find_plugin_folders

FILE = typer.Argument(..., help="YAML file of a run.")
OVERRIDES = typer.Argument(None, metavar="[KEY=VALUE]...", help="Values over those of the file.")


def command(
    file: Path = FILE,
    overrides: list[str] = OVERRIDES,
    plugin_dir: list[Path] = PLUGIN_DIR,
) -> None:
    """Show all that is wrong with a file. Starts nothing; exit code 2 if anything is."""
    from trinity.common.config.advice import find_advice
    from trinity.common.config.unread import find_unread
    from trinity.common.config.validate import validate_file
    from trinity.common.errors import ConfigError

    config, problems = validate_file(file, overrides or (), find_plugin_folders(plugin_dir))
    for warning in config.source.warnings if config else ():
        typer.echo(f"note: {warning}", err=True)
    if problems or config is None:
        raise ConfigError(problems, str(file))
    for problem in find_unread(config):
        typer.echo(f"note: {problem.key}: {problem.message} `trinity run` refuses it.", err=True)
    for advice in find_advice(config):
        typer.echo(f"advice: {advice}", err=True)
    stages = ", ".join(stage.stage_name for stage in config.stages)
    what = f"stages {stages}" if stages else f"{config.algorithm.algorithm_type}"
    typer.echo(f"{file} is valid: mode {config.mode}, {what}.")
