"""`trinity data`: look at data sets before a run, and copy them into other forms."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trinity.cli.plugin_folders import PLUGIN_DIR
from trinity.cli.usage import UsageError
from trinity.utils.words import counted

if TYPE_CHECKING:
    from rich.console import Console

    from trinity.buffer.inspection import Seen, Statistics
    from trinity.cli.data_sources import DataSet

app = typer.Typer(
    help="Look at data sets before a run, and copy them into other forms.", no_args_is_help=True
)

PATH = typer.Argument(None, help="File, folder, hub name or database. Or give --config.")
CONFIG = typer.Option(None, "--config", "-c", help="YAML file of a run: its data sets, its model.")
NAME = typer.Option(None, "--name", "-n", help="Data set of the config; its first if not given.")
SPLIT = typer.Option("train", "--split", help="Split, also a part such as 'train[:100]'.")
SUBSET = typer.Option(None, "--subset", help="Subset of the data set.")
TABLE = typer.Option("", "--table", help="Table of a database.")
KIND = typer.Option("task", "--kind", help="What rows are: task, sft, dpo or cpt.")
KEYS = typer.Option(
    None, "--key", "-k", help="Key of the format, e.g. prompt_key=question; may be repeated."
)
MODEL = typer.Option(None, "--model", help="Model folder: its tokenizer and chat template.")
WORKFLOW = typer.Option(None, "--workflow", help="Workflow that asks the tasks.")
ROWS = typer.Option(3, "--rows", "-r", min=1, help="Rows to show.")
START = typer.Option(0, "--start", "-s", min=0, help="First row to show, from 0.")
MEASURED = typer.Option(5000, "--sample", min=1, help="Rows whose length is measured.")


def _named(
    path: str = PATH,
    config: Path = CONFIG,
    name: str = NAME,
    split: str = SPLIT,
    subset: str = SUBSET,
    table: str = TABLE,
    kind: str = KIND,
    key: list[str] = KEYS,
    model: str = MODEL,
    workflow: str = WORKFLOW,
    plugin_dir: list[Path] = PLUGIN_DIR,
) -> None:
    """The options that name a data set: what `data_sources.Named` holds."""


def _on_data_set(command: Callable[..., None]) -> Callable[..., None]:
    """``command``, with the options of `_named` in place of its first argument."""
    shared = list(inspect.signature(_named).parameters.values())
    own = list(inspect.signature(command).parameters.values())[1:]

    def run(**given: Any) -> None:
        from trinity.cli.data_sources import Named, find_data_set

        named = Named(**{option.name: given.pop(option.name) for option in shared})
        command(find_data_set(named), **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {option.name: option.annotation for option in (*shared, *own)}
    run.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]  # for typer
    return run


@app.command()
@_on_data_set
def show(found: "DataSet", rows: int = ROWS, start: int = START) -> None:
    """Show rows as the model will see them: rendered prompt, tokens, truncation."""
    from rich.console import Console

    from trinity.buffer.inspection import look
    from trinity.buffer.rows import BadRow

    if start >= len(found.rows):
        raise UsageError(f"--start is {start}, but {found.name} has {len(found.rows)} rows.")
    console = Console(highlight=False, markup=False)
    console.print(f"{found.name}: {len(found.rows)} rows, columns {', '.join(found.rows.columns)}")
    for index in range(start, min(start + rows, len(found.rows))):
        seen = look(found.rows, index, found.viewer)
        if isinstance(seen, BadRow):
            console.print(f"bad row: {seen}", style="red")
        else:
            _show_row(console, seen, found)
    if found.hint:
        console.print(found.hint, style="dim")


def _show_row(console: "Console", seen: "Seen", found: "DataSet") -> None:
    from rich.panel import Panel
    from rich.text import Text

    from trinity.utils.terminal import harmless

    text = Text()
    for label, content in seen.parts:
        size = seen.num_tokens.get(label)
        text.append(f"{label}" + ("" if size is None else f" ({size} {found.unit})"), "bold")
        text.append(f"\n{harmless(str(content))}\n")
    if seen.note:
        text.append(seen.note, "bold red")
    console.print(Panel(text, title=seen.where, title_align="left", expand=False))


@app.command()
@_on_data_set
def stats(found: "DataSet", sample: int = MEASURED) -> None:
    """Count rows, broken ones and repetitions, draw the lengths. Exit code 1 for broken rows."""
    from rich.console import Console

    from trinity.buffer.inspection import statistics

    figures = statistics(
        found.rows, found.check, found.viewer, key=found.compared, max_measured=sample
    )
    _show_statistics(Console(highlight=False, markup=False), figures, found)
    if figures.bad_rows:
        raise typer.Exit(1)


def _show_statistics(console: "Console", figures: "Statistics", found: "DataSet") -> None:
    from trinity.buffer.inspection import histogram

    console.print(f"{found.name}: {figures.num_rows} rows", style="bold")
    console.print(f"columns: {', '.join(figures.columns)}")
    console.print(f"broken: {len(figures.bad_rows)}")
    for bad in figures.bad_rows[:20]:
        console.print(f"  {bad}")
    of = f" (by {found.compared!r})" if found.compared else ""
    console.print(f"repeated{of}: {figures.num_duplicates}")
    for where, earlier in figures.duplicates:
        console.print(f"  {where} = {earlier}")
    measured = f"{counted(figures.num_measured, 'row')} measured"
    if figures.num_cut:
        measured += f", {figures.num_cut} too long for the model"
    console.print(measured)
    for label, lengths in figures.lengths.items():
        mean = sum(lengths) / len(lengths)
        console.print(
            f"{label}, {found.unit}: {min(lengths)} to {max(lengths)}, mean {mean:.1f}",
            style="bold",
        )
        most = max(count for _, _, count in histogram(lengths))
        for low, high, count in histogram(lengths):
            bar = "█" * round(40 * count / most)
            console.print(f"  {low:>7} - {high:<7} {count:>7} {bar}")


@app.command()
def convert(
    source: str = typer.Argument(..., help="File, folder, hub name or database."),
    target: str = typer.Argument(..., help="A .jsonl or .parquet file, or a database."),
    split: str = SPLIT,
    subset: str = SUBSET,
    table: str = typer.Option("", "--table", help="Table of the source."),
    target_table: str = typer.Option("", "--target-table", help="Table of the target."),
) -> None:
    """Copy tasks or experiences between JSON lines, Parquet and databases."""
    from trinity.buffer.convert import convert as copy

    kind, count = copy(
        source, target, split=split, subset=subset, table=table, target_table=target_table
    )
    typer.echo(f"{count} {kind} written to {target}.")
