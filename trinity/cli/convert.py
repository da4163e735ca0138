"""`trinity convert`: checkpoints of a trainer to Hugging Face folders."""

from pathlib import Path

import typer

CHECKPOINT_DIR = typer.Option(
    ..., "--checkpoint-dir", "-c", help="A job's folder, one of its global_step_N, or inside one."
)
BASE_MODEL_DIR = typer.Option(
    None, "--base-model-dir", "-b", help="Model folder that brings a missing config.json."
)
STEP = typer.Option("", "--step", "-s", help="Only these steps, e.g. 100,200.")
MERGE = typer.Option(False, "--merge", help="Add a LoRA adapter into the weights.")


def command(
    checkpoint_dir: Path = CHECKPOINT_DIR,
    base_model_dir: Path = BASE_MODEL_DIR,
    step: str = STEP,
    merge: bool = MERGE,
) -> None:
    """Write actor/huggingface of every checkpoint below a folder; those that have it are left."""
    from rich.console import Console
    from rich.table import Table

    from trinity.checkpoint.convert import convert, find_step_folders, steps_among

    console = Console()
    try:
        folders = steps_among(find_step_folders(checkpoint_dir), _numbers(step))
    except (FileNotFoundError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if not folders:
        typer.echo(f"No global_step_<N> folder in or above {checkpoint_dir}.", err=True)
        raise typer.Exit(1)
    outcomes = []
    for number, folder in enumerate(folders, start=1):
        console.print(f"[{number}/{len(folders)}] {folder} ...", markup=False)
        outcomes.append(convert(folder, base_model_dir, merge))
    table = Table("checkpoint", "result", "")
    for outcome in outcomes:
        table.add_row(_name_below(outcome.folder, checkpoint_dir), outcome.status, outcome.message)
    console.print(table)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        typer.echo(f"{outcome.folder}: {outcome.message}", err=True)
    raise typer.Exit(1 if failed else 0)


def _name_below(folder: Path, root: Path) -> str:
    """How a table of checkpoints below ``root`` names one of them."""
    root = root.absolute()
    is_below = folder.is_relative_to(root) and folder != root
    return str(folder.relative_to(root)) if is_below else folder.name


def _numbers(steps: str) -> list[int]:
    parts = [part.strip() for part in steps.split(",") if part.strip()]
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"--step is {steps!r}; give numbers, such as 100,200.")
    return [int(part) for part in parts]
