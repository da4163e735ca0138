"""`trinity debug`: try a workflow on one task, without a run."""

import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from trinity.cli.plugin_folders import PLUGIN_DIR, load_plugin_folders
from trinity.cli.run_command import CPU
from trinity.cli.usage import UsageError

CONFIG = typer.Option(None, "--config", "-c", help="YAML file of the run.")
OVERRIDES = typer.Argument(None, metavar="[KEY=VALUE]...", help="Values over those of the file.")
MODULE = typer.Option(
    "workflow",
    "--module",
    "-m",
    help="workflow: run a task. inference_model: load the model once, for other terminals. "
    "viewer: show the page of the last run in a browser.",
)
OUTPUT = typer.Option("debug_output", "--output-dir", "-o", help="Folder for page and database.")
OUTPUT_FILE = typer.Option(None, "--output-file", hidden=True)
KEEP = typer.Option(False, "--disable-overwrite", help="Write beside an output that is there.")
PROFILE = typer.Option(False, "--enable-profiling", help="Write profiling.html (viztracer).")
PORT = typer.Option(8502, "--port", "-p", help="Port of the viewer.")
TASK = typer.Option(0, "--task", help="Place of the task in its taskset, from 0.")
TASKSET = typer.Option(None, "--taskset", help="Name of the taskset; the first one if not given.")
REPEAT = typer.Option(1, "--repeat", min=1, help="Runs of the task.")
FAKE = typer.Option(None, "--fake", help="Reply of a scripted model; repeat for further replies.")


def command(
    config: Path = CONFIG,
    overrides: list[str] = OVERRIDES,
    module: str = MODULE,
    plugin_dir: list[Path] = PLUGIN_DIR,
    output_dir: Path = OUTPUT,
    output_file: Path = OUTPUT_FILE,
    disable_overwrite: bool = KEEP,
    enable_profiling: bool = PROFILE,
    port: int = PORT,
    task: int = TASK,
    taskset: str = TASKSET,
    repeat: int = REPEAT,
    fake: list[str] = FAKE,
    cpu: bool = CPU,
) -> None:
    """Try a workflow on one task: show its turns, tokens, rewards and time."""
    import asyncio
    import os

    from rich.console import Console

    folder = _folder(output_file or output_dir, disable_overwrite and module == "workflow")
    if module == "viewer":
        _view(folder, port)
        return
    if module not in ("workflow", "inference_model"):
        raise UsageError(f"--module is {module!r}; use workflow, inference_model or viewer.")
    if config is None:
        raise UsageError("--config is missing: the YAML file whose workflow or model is meant.")
    with _no_collector():
        from trinity.common.config import load_config
        from trinity.launcher.cpu import for_cpu
        from trinity.launcher.debug import DebugRun, debug_workflow, serve_models
        from trinity.utils.log import LOG_DIR_ENV

    console = Console(highlight=False)
    os.environ.setdefault(LOG_DIR_ENV, str(folder / "log"))
    sys.path.insert(0, os.getcwd())
    loaded = load_config(config, overrides or ())
    if cpu:
        loaded, _ = for_cpu(loaded)
    plugin_dirs = tuple(load_plugin_folders(plugin_dir))
    if module == "inference_model":
        asyncio.run(serve_models(loaded, console))
        return
    run = DebugRun(loaded, task, taskset, repeat, tuple(fake or ()), folder, plugin_dirs)
    with _profile(folder, enable_profiling):
        asyncio.run(debug_workflow(run, console))


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Imports leave no cycles to find; to look for them takes a quarter of a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _folder(path: Path, is_kept: bool) -> Path:
    """The output folder; the older option named a file in it."""
    import time

    folder = path.parent if path.suffix in (".html", ".db", ".json") else path
    if is_kept and folder.exists():
        return folder.with_name(f"{folder.name}_{time.strftime('%Y%m%d%H%M%S')}")
    return folder


def _profile(folder: Path, is_wanted: bool):  # type: ignore[no-untyped-def]  # a context manager
    if not is_wanted:
        return contextlib.nullcontext()
    from trinity.common.extras import needed

    viztracer = needed("viztracer", "debug", "--enable-profiling")
    folder.mkdir(parents=True, exist_ok=True)
    return viztracer.VizTracer(output_file=str(folder / "profiling.html"), verbose=0)


def _view(folder: Path, port: int) -> None:
    """Serve the output folder's page to this machine until Ctrl-C."""
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    if not (folder / "index.html").is_file():
        raise UsageError(f"{folder} has no page: run trinity debug --module workflow first.")
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    typer.echo(f"http://127.0.0.1:{port}  (Ctrl-C ends)")
    ThreadingHTTPServer(("127.0.0.1", port), handler).serve_forever()
