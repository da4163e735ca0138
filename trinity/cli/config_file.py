"""The file a command is about, and values over it: `my.yaml a.b=1`, `--config my.yaml a.b=1`."""

from collections.abc import Sequence
from pathlib import Path

import typer

from trinity.cli.usage import UsageError

CONFIG = typer.Option(None, "--config", "-c", help="YAML file of the run; or name it first.")
ARGUMENTS = typer.Argument(
    None, metavar="FILE KEY=VALUE", help="YAML file of the run, and values over those of it."
)


def file_and_overrides(
    config: Path | None, arguments: Sequence[str] | None
) -> tuple[Path, tuple[str, ...]]:
    """The file, and `a.b.c=value` for each key that is set over it.

    Raises:
        UsageError: There is no file.
    """
    given = tuple(arguments or ())
    if config is not None:
        return config, given
    if not given or ("=" in given[0] and not Path(given[0]).exists()):
        raise UsageError("Name the YAML file of the run: my.yaml, or --config my.yaml.")
    return Path(given[0]), given[1:]
