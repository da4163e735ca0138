"""`trinity import-verl`: a veRL launch script or YAML as a file of ours."""

from pathlib import Path

import typer

SOURCE = typer.Argument(..., help="Launch script (.sh) or YAML file of veRL.")
OUTPUT = typer.Option(None, "--output", "-o", help="File to write; without it, the screen.")


def command(source: Path = SOURCE, output: Path | None = OUTPUT) -> None:
    """Turn a veRL launch into a YAML file of ours, each line naming the key it came from."""
    from trinity.common.config.verl.launch import import_verl
    from trinity.common.errors import ConfigError, Problem

    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        message = f"{str(source)!r} cannot be read: {why}."
        raise ConfigError([Problem("", message, "Check the path.")], str(source)) from error
    imported = import_verl(text)
    if output is None:
        typer.echo(imported.text(), nl=False)
        return
    output.write_text(imported.text(), encoding="utf-8")
    typer.echo(f"Wrote {output}. Try: trinity explain {output}")
    for note in imported.to_check:
        typer.echo(f"  to check: {note}")
    for key, value, why in imported.left_out:
        typer.echo(f"  no counterpart: {key}={value} ({why})")
