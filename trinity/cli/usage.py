"""What commands share: the error of arguments that don't fit, and the option for plugins."""

import typer

from trinity.common.errors import TrinityError

PLUGIN_DIR = typer.Option(None, "--plugin-dir", help="Folder of your plugins; may be repeated.")


class UsageError(TrinityError):
    """The arguments don't fit."""

    exit_code = 2
