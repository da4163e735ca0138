"""`trinity run`: the arguments. The work is in `trinity.cli.run`."""

from pathlib import Path

import typer

from trinity.cli.config_file import ARGUMENTS, CONFIG, file_and_overrides
from trinity.cli.plugin_folders import PLUGIN_DIR

CPU = typer.Option(False, "--cpu", help="Run on this machine's CPU: replaces GPUs, engine, sync.")
DRY_RUN = typer.Option(False, "--dry-run", help="Show the plan and check all; start nothing.")
DLC = typer.Option(
    False, "--dlc", help="Run on all machines of a DLC job; each of them gives this command."
)


def command(
    arguments: list[str] = ARGUMENTS,
    config: Path = CONFIG,
    plugin_dir: list[Path] = PLUGIN_DIR,
    cpu: bool = CPU,
    dry_run: bool = DRY_RUN,
    dlc: bool = DLC,
) -> None:
    """Run what a YAML file describes. Any key can be set as `a.b.c=value`."""
    from trinity.cli.run import run

    file, overrides = file_and_overrides(config, arguments)
    raise typer.Exit(run(file, overrides, plugin_dir or (), cpu=cpu, dry_run=dry_run, dlc=dlc))
