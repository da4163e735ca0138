"""`trinity run`: load, check, plan and run a configuration."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trinity.cli.plugin_folders import load_plugin_folders
from trinity.cli.usage import UsageError
from trinity.common.config import Config
from trinity.common.config.advice import advice_of
from trinity.common.config.validate import validate_file
from trinity.common.errors import ConfigError
from trinity.launcher.cpu import Replacement, for_cpu
from trinity.launcher.gpu_needs import NotEnoughGpusError, check_gpus
from trinity.launcher.screen import Screen


def run(
    config: Path,
    overrides: Sequence[str] = (),
    plugin_dir: Sequence[Path] = (),
    cpu: bool = False,
    dry_run: bool = False,
    dlc: bool = False,
) -> int:
    """Run a configuration file; the exit code of the process.

    Raises:
        TrinityError: The run can't start; its text says what to do.
    """
    screen = Screen(Console(highlight=False))
    replaced: list[Replacement] = []

    def fit_to_cpu(loaded: Config) -> Config:
        fitted, changes = for_cpu(loaded)
        replaced.extend(changes)
        return fitted

    adapt = fit_to_cpu if cpu else None
    loaded, plugin_dirs = load(config, overrides, plugin_dir, screen, adapt)
    if replaced:
        screen.show(_replacements(replaced))

    def launch() -> int:
        from trinity.launcher.launch import run_config

        return run_config(loaded, plugin_dirs, screen, is_dry=dry_run)

    if dlc and not dry_run:
        return _start_on_dlc(loaded, screen, launch)
    return start(loaded, screen, launch)


def _start_on_dlc(config: Config, screen: Screen, launch: Callable[[], int]) -> int:
    """`start` on the machine of rank 0 of a DLC job; the others work for it."""
    from trinity.launcher.dlc import DLCJob, run_on_dlc

    address = config.cluster.ray_address
    if address != "auto":
        raise UsageError(
            f"cluster.ray_address is {address!r}, and --dlc starts the cluster. Leave one out."
        )
    return run_on_dlc(DLCJob.from_env(), lambda: start(config, screen, launch), screen.say)


def load(
    config: Path,
    overrides: Sequence[str],
    plugin_dir: Sequence[Path],
    screen: Screen,
    adapt: Callable[[Config], Config] | None = None,
) -> tuple[Config, list[str]]:
    """A sound configuration, changed by ``adapt``, and its folders of plugins, which are loaded.

    Raises:
        ConfigError: All that is wrong with it.
        UsageError, BrokenPluginError: Plugins can't be had.
    """
    _make_importable(os.getcwd())
    plugin_dirs = load_plugin_folders(plugin_dir)  # they may bring algorithms
    loaded, problems, cases = validate_file(config, overrides, plugin_dirs, adapt)
    if problems or loaded is None:
        raise ConfigError(problems, str(config))
    for note in [*loaded.source.warnings, *advice_of(cases)]:
        screen.say(f"note: {note}", style="dim")
    return loaded, plugin_dirs


def start(config: Config, screen: Screen, launch: Callable[[], int]) -> int:
    """``launch`` a sound configuration. It imports what trains once there are GPUs enough."""
    try:
        check_gpus(config)
        return launch()
    except NotEnoughGpusError as error:
        screen.show(error.needs.table())
        raise


def _make_importable(folder: str) -> None:
    """Let dotted paths in a configuration name modules of ``folder``, as `python -m` would."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _replacements(replaced: Sequence[Replacement]) -> Table:
    table = Table(title="--cpu replaces")
    table.add_column("key", no_wrap=True)
    table.add_column("by the file", overflow="fold")
    table.add_column("on this run", overflow="fold")
    for change in replaced:
        table.add_row(Text(change.key), Text(str(change.before)), Text(str(change.after)))
    return table
