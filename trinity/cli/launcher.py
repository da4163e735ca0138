"""`trinity`: the table of commands, and how their errors end the program.

A command lives in its own module, as a function ``command`` that imports its work when called; a
group of commands (`trinity data show`) as a `typer.Typer` called ``app``. Both are light to import.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module

import typer

from trinity import __version__
from trinity.common.errors import TrinityError

COMMANDS = {
    "run": "trinity.cli.run_command",
    "validate": "trinity.cli.validate",
    "explain": "trinity.cli.explain",
    "schema": "trinity.cli.schema",
    "data": "trinity.cli.data",
    "debug": "trinity.cli.debug",
    "convert": "trinity.cli.convert",
    "new": "trinity.cli.new",
    "import-verl": "trinity.cli.import_verl",
    "log": "trinity.cli.log",
    "view": "trinity.cli.view",
    "perf": "trinity.cli.perf",
    "studio": "trinity.cli.studio",
}
"""Name on the command line -> module of the command."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

app = typer.Typer(
    help="Fine-tune language models by reinforcement learning. One YAML file describes a run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add(name: str, module: str) -> None:
    home = import_module(module)
    if hasattr(home, "app"):
        app.add_typer(home.app, name=name)
    else:
        app.command(name)(home.command)


for _name, _module in COMMANDS.items():
    _add(_name, _module)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trinity {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Fine-tune language models by reinforcement learning. One YAML file describes a run."""


def main() -> None:
    """Entry point. What trinity raises on purpose is shown as its text, and sets the exit code."""
    try:
        app()
    except TrinityError as error:
        typer.echo(str(error), err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        gc.freeze()  # else the end of Python looks through all of torch for cycles: 0.4 s


if __name__ == "__main__":
    main()
