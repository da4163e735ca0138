"""`trinity explain`: the arithmetic of a run as tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from trinity.cli.config_file import ARGUMENTS, CONFIG, file_and_overrides
from trinity.cli.plugin_folders import PLUGIN_DIR, find_plugin_folders

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from trinity.cli.explanation import Explanation
    from trinity.common.config.memory_parts import Part

GPU_MEMORY = typer.Option(80.0, "--gpu-memory", help="Memory of one GPU, in GiB.")


def command(
    arguments: list[str] = ARGUMENTS,
    config: Path = CONFIG,
    plugin_dir: list[Path] = PLUGIN_DIR,
    gpu_memory: float = GPU_MEMORY,
) -> None:
    """Show what a step of a run is made of, which GPU does what, and how much memory it takes."""
    from rich.console import Console

    from trinity.cli.explanation import explain_stage
    from trinity.common.config.validate import validate_file
    from trinity.common.errors import ConfigError

    file, overrides = file_and_overrides(config, arguments)
    verdict = validate_file(file, overrides, find_plugin_folders(plugin_dir))
    if verdict.problems:
        raise ConfigError(verdict.problems, str(file))
    console = Console(highlight=False)
    for stage in verdict.cases:
        _show(console, explain_stage(stage, gpu_memory * 2**30))


def _show(console: Console, explanation: Explanation) -> None:
    from rich.panel import Panel
    from rich.text import Text

    console.print(Text(explanation.title, style="bold"))
    console.print(Panel(Text(explanation.picture), expand=False))
    console.print(_table("a step", ("what", "number", "from"), explanation.step))
    if explanation.batch_sizes:
        columns = ("key", "here", "meaning")
        console.print(_table("the five batch sizes", columns, explanation.batch_sizes))
    console.print(_table("who runs where", ("part", "GPUs", "what"), explanation.places))
    for title, parts in explanation.memory.items():
        console.print(_memory_table(title, parts))
    columns = ("what", "size or number", "from")
    console.print(_table("checkpoints", columns, explanation.checkpoints))
    for note in explanation.notes:
        console.print(Text(f"- {note}"))


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    """``rows`` below ``columns``, of which the second holds numbers."""
    from rich.table import Table
    from rich.text import Text

    from trinity.cli.columns import column_widths

    table = Table(title=title, title_justify="left", title_style="bold")
    for index, width in enumerate(column_widths([columns, *rows])):
        table.add_column(columns[index], overflow="fold", width=width)
    table.columns[1].justify = "right"
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _memory_table(title: str, parts: list[Part]) -> Table:
    from rich.text import Text

    rows = [(part.name, f"{part.bytes / 2**30:.2f}", part.how) for part in parts]
    table = _table(title, ("part", "GiB", "how"), rows)
    total = sum(part.bytes for part in parts) / 2**30
    table.add_section()
    table.add_row(Text("all"), Text(f"{total:.2f}"), Text(""), style="bold")
    return table
