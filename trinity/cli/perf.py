"""`trinity perf`: how fast the explorer of a run is by itself, and the page that shows it."""

from pathlib import Path

import typer

from trinity.cli.pages import HOST, show_page
from trinity.cli.plugin_folders import PLUGIN_DIR
from trinity.cli.usage import UsageError

app = typer.Typer(help="Measure how fast the explorer of a run is.", no_args_is_help=True)

CONFIG = typer.Option(..., "--config", "-c", help="YAML file of the run.")
OVERRIDES = typer.Argument(None, metavar="[KEY=VALUE]...", help="Values over those of the file.")
MODULE = typer.Option("explorer", "--module", "-m", help="What is measured: explorer.")
OUTPUT = typer.Option("perf/output.json", "--output-path", "-o", help="File of the report.")
INTERVAL = typer.Option(
    2.0, "--monitor-interval", min=0.05, help="Seconds between two looks at machine and engines."
)
STEPS = typer.Option(5, "--total-steps", min=1, help="Steps of the explorer.")
TIMEOUT = typer.Option(None, "--timeout", min=1.0, help="Seconds after which it is ended.")
REPORT = typer.Option("perf/output.json", "--report", "-r", help="File of the report.")
PORT = typer.Option(8503, "--port", "-p", help="Port of the page.")


@app.command()
def run(
    config: Path = CONFIG,
    overrides: list[str] = OVERRIDES,
    module: str = MODULE,
    output_path: Path = OUTPUT,
    monitor_interval: float = INTERVAL,
    total_steps: int = STEPS,
    timeout: float = TIMEOUT,
    plugin_dir: list[Path] = PLUGIN_DIR,
) -> None:
    """Run the explorer alone for some steps, and write what it took as JSON."""
    if module != "explorer":
        raise UsageError(f"--module is {module!r}; only explorer can be measured by itself.")
    if output_path.is_dir():
        raise UsageError(f"--output-path {output_path} is a folder; name a file.")
    from functools import partial

    from rich.console import Console

    from trinity.cli.run import load, start
    from trinity.launcher.screen import Screen
    from trinity.perf.alone import explorer_alone

    screen = Screen(Console(highlight=False))
    root = output_path.resolve().parent / "jobs"
    adapt = partial(explorer_alone, root=root, total_steps=total_steps)
    loaded, plugin_dirs = load(config, overrides or (), plugin_dir or (), screen, adapt)

    def launch() -> int:
        from trinity.perf.measure import Measuring, measure

        measuring = Measuring(output_path, monitor_interval, timeout)
        return measure(loaded, plugin_dirs, screen, measuring)

    raise typer.Exit(start(loaded, screen, launch))


@app.command()
def view(report: Path = REPORT, port: int = PORT, host: str = HOST) -> None:
    """Show a report on a page in the browser. Ends with Ctrl-C."""
    from trinity.perf.report import read_report

    read_report(report)
    show_page("trinity.perf.page", "trinity perf view", port, host, ["--report", str(report)])
