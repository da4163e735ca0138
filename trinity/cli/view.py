"""`trinity view`: the page that shows the experiences of a database, or the data in it."""

from pathlib import Path

import typer

from trinity.cli.pages import HOST, show_page

CONFIG = typer.Option(None, "--config", "-c", help="YAML file of a run: what it sampled is shown.")
URL = typer.Option(None, "--url", help="Database, or the path of a SQLite file.")
TABLE = typer.Option(None, "--table", help="Name of the buffer in it.")
TOKENIZER = typer.Option(None, "--tokenizer", help="Model folder whose tokenizer reads the tokens.")
SCHEMA = typer.Option(
    None, "--schema", help="experience, sft, dpo or task; None: what the table holds."
)
PORT = typer.Option(8502, "--port", "-p", help="Port of the page.")

_SCHEMAS = ("experience", "sft", "dpo", "task")


def command(
    config: Path = CONFIG,
    url: str = URL,
    table: str = TABLE,
    tokenizer: str = TOKENIZER,
    schema: str = SCHEMA,
    port: int = PORT,
    host: str = HOST,
) -> None:
    """Show what was sampled or trained on, or tasks, on a page in the browser. Ends with Ctrl-C."""
    from trinity.cli.usage import UsageError

    if schema not in (None, *_SCHEMAS):
        raise UsageError(f"--schema is {schema!r}; it may be {', '.join(_SCHEMAS)}.")
    found = {} if config is None else _tasks_of(config) if schema == "task" else _of_run(config)
    given = {"url": url, "table": table, "tokenizer": tokenizer, "schema": schema}
    found |= {name: value for name, value in given.items() if value}
    if not found.get("url"):
        raise UsageError("Name the run with --config, or a database with --url and --table.")
    address = found["url"].removeprefix("sqlite:///")
    if "://" not in address and not Path(address).is_file():
        raise UsageError(f"There is no database {address}: has the run started?")
    arguments = [word for name, value in found.items() for word in (f"--{name}", value)]
    show_page("trinity.perf.viewer", "trinity view", port, host, arguments)


def _of_run(config: Path) -> dict[str, str]:
    """Where the last stage that explores keeps its experiences: as sampled, else as trained on."""
    from trinity.cli.usage import UsageError
    from trinity.common.config import load_config
    from trinity.common.config.case import cases_of

    stages = [stage.config for stage in cases_of(load_config(config))]
    last = next((s for s in reversed(stages) if s.mode.explores), stages[-1])
    tokenizer = last.model.model_path
    pipeline, buffer = last.data_processor.experience_pipeline, last.buffer.trainer_input
    if pipeline.save_input and pipeline.input_save_path:
        path, table = pipeline.input_save_path, "pipeline_input"
    elif buffer.experience_buffer is not None and buffer.experience_buffer.path:
        path, table = buffer.experience_buffer.path, buffer.experience_buffer.name
    else:
        raise UsageError(
            f"The run of {config} keeps no experiences: set "
            "`data_processor.experience_pipeline.save_input: true`."
        )
    return {"url": path, "table": table, "tokenizer": tokenizer}


def _tasks_of(config: Path) -> dict[str, str]:
    """The first set of tasks that is in a database."""
    from trinity.cli.usage import UsageError
    from trinity.common.config import load_config
    from trinity.common.config.case import cases_of
    from trinity.common.constants import StorageType

    for stage in cases_of(load_config(config)):
        tasks = stage.config.buffer.explorer_input
        for taskset in [*tasks.tasksets, *tasks.eval_tasksets]:
            if taskset.storage_type is StorageType.SQL:
                return {"url": taskset.path or "", "table": taskset.name}
    raise UsageError(f"No tasks of {config} are in a database; `trinity data` shows files.")
