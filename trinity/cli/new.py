"""`trinity new`: a plugin to start from."""

from pathlib import Path

import typer

KIND = typer.Argument(..., metavar="KIND", help="workflow, reward, algorithm or operator.")
NAME = typer.Argument(..., metavar="NAME", help="Its name, in small letters and underscores.")
FOLDER = typer.Option("plugins", "--dir", "-d", help="Folder of your plugins; made if needed.")


def command(kind: str = KIND, name: str = NAME, folder: Path = FOLDER) -> None:
    """Write a plugin and a test of it that passes."""
    from trinity.launcher.scaffold import how_to_use, write_plugin

    plugin, test = write_plugin(kind, name, folder)
    typer.echo(f"Written: {plugin} and {test}")
    typer.echo(f"Test it: pytest {test}")
    typer.echo(f"Use it:  {how_to_use(kind, name)}, and trinity run --plugin-dir {folder} ...")
