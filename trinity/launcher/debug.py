"""`trinity debug`: one task through its workflow, shown turn by turn; no training, no Ray.

The model is that of another terminal (``--module inference_model``), or one started here, or
scripted replies. What came of it is printed, and written as a database and a page.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trinity.buffer import get_buffer_writer, make_storage
from trinity.buffer.taskset import open_taskset
from trinity.common.config import Config, derive
from trinity.common.config.buffer import ExperienceBufferConfig, TasksetConfig
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.constants import EngineType, StorageType
from trinity.common.errors import ConfigError, Problem, TrinityError
from trinity.common.experience import Experience, deserialize_many
from trinity.common.models.protocol import InferenceEngine
from trinity.common.workflows import Task, check_workflow
from trinity.explorer.runner import RunnerSettings, WorkflowRunner
from trinity.explorer.units import Unit, UnitResult, stable_seed
from trinity.launcher.debug_page import page_of
from trinity.launcher.engine_link import EngineClient, EngineServer, socket_path
from trinity.launcher.turns import Decode, turns_of
from trinity.utils.terminal import harmless
from trinity.utils.words import counted


class DebugError(TrinityError):
    """The workflow failed, or there is nothing to run it on."""


@dataclass(frozen=True)
class DebugRun:
    """What to run.

    Args:
        task: Place of the task in its taskset, from 0.
        taskset: Name of the taskset; None: the first one.
        repeat: Runs of the task.
        fake: Replies of a scripted model, used in turn; empty: a real one.
        output: Folder for database and page.
    """

    config: Config
    task: int = 0
    taskset: str | None = None
    repeat: int = 1
    fake: tuple[str, ...] = ()
    output: Path = Path("debug_output")
    plugin_dirs: tuple[str, ...] = ()


async def serve_models(config: Config, console: Console) -> None:
    """Load the models of ``config`` and serve them to other terminals, until cancelled."""
    filled, _ = derive(config)
    servers = []
    for label, model in _models(filled):
        engine = local_engine(filled, model)
        start = time.perf_counter()
        await engine.prepare()
        servers.append(EngineServer(engine, socket_path(_label(filled, label, model))))
        await servers[-1].start()
        console.print(f"{label}: {model.model_path} ready in {time.perf_counter() - start:.1f} s")
    console.print("In another terminal: trinity debug --module workflow --config ...  Ctrl-C ends.")
    try:
        await asyncio.Event().wait()
    finally:
        for server in servers:
            await server.close()


async def debug_workflow(run: DebugRun, console: Console) -> list[Experience]:
    """Run one task, show and write what came of it; its experiences.

    Raises:
        ConfigError: The taskset can't work.
        DebugError: All runs failed; their errors have been shown.
    """
    filled, _ = derive(run.config)
    task = _the_task(filled, run)
    model, auxiliary = await _the_models(filled, run, console)
    runner = WorkflowRunner(
        0, cast(Any, model), cast(Any, auxiliary), RunnerSettings(plugin_dirs=run.plugin_dirs)
    )
    await runner.prepare()
    unit = Unit(
        0,
        task,
        tuple(range(run.repeat)),
        stable_seed(filled.seed, "debug", run.task),
        filled.explorer.max_timeout,
    )
    result = await runner.run_unit(unit)
    await runner.close()
    experiences = deserialize_many(result.payload) if result.payload else []
    decode = _decoder(model)
    _show(console, task, result, experiences, decode)
    await _write(run.output, task, result, experiences, decode)
    console.print(f"Written: {run.output / 'index.html'}, {run.output / 'experiences.db'}")
    if not experiences:
        raise DebugError("No run gave an experience; the reasons are shown above.")
    return experiences


def local_engine(config: Config, model: InferenceModelConfig) -> InferenceEngine:
    """An engine in this process.

    Raises:
        DebugError: This type of engine does not run so.
    """
    engine: InferenceEngine
    if model.engine_type is EngineType.TINKER:
        from trinity.engine.tinker.engine import TinkerEngine
        from trinity.launcher.build_engine import tinker_settings

        engine = TinkerEngine(tinker_settings(config, model))
        return engine
    if model.engine_type is not EngineType.TORCH:
        raise DebugError(
            f"trinity debug runs the embedded engine, but engine_type is '{model.engine_type}'. "
            "Add --cpu for the embedded one in its place, or use --fake."
        )
    from trinity.engine.torch.engine import TorchEngine
    from trinity.launcher.build_engine import torch_settings
    from trinity.launcher.hardware import cpu_cores

    engine = TorchEngine(torch_settings(config, model, cpu_cores(), "cpu"))
    return engine


def _models(config: Config) -> list[tuple[str, InferenceModelConfig]]:
    auxiliary = config.explorer.auxiliary_models
    return [
        ("model", config.explorer.rollout_model),
        *((f"auxiliary model {index}", model) for index, model in enumerate(auxiliary)),
    ]


def _label(config: Config, label: str, model: InferenceModelConfig) -> str:
    path = model.model_path or config.model.model_path
    return f"{label}:{Path(path).resolve() if Path(path).exists() else path}"


async def _the_models(config: Config, run: DebugRun, console: Console) -> tuple[Any, list[Any]]:
    if run.fake:
        from trinity.common.models.fake import FakeModel

        replies = _Script(run.fake)
        others = [FakeModel(replies, name="auxiliary") for _ in config.explorer.auxiliary_models]
        return FakeModel(replies), others
    from trinity.common.models import ModelWrapper
    from trinity.launcher.build_engine import model_settings

    wrappers = []
    for label, model in _models(config):
        engine = await _engine_for(config, label, model, console)
        settings = replace(model_settings(config, model), enable_history=True)
        wrappers.append(ModelWrapper(engine, settings))
    return wrappers[0], wrappers[1:]


async def _engine_for(
    config: Config, label: str, model: InferenceModelConfig, console: Console
) -> InferenceEngine:
    client = EngineClient(socket_path(_label(config, label, model)))
    with contextlib.suppress(OSError):
        await client.prepare()
        console.print(f"{label}: the one of the other terminal")
        return client
    console.print(f"{label}: loading {model.model_path} (none runs in another terminal)")
    engine = local_engine(config, model)
    await engine.prepare()
    return engine


class _Script:
    """Gives the replies in turn, and the last one for ever."""

    def __init__(self, replies: Sequence[str]) -> None:
        self._replies = list(replies)

    def __call__(self, messages: object) -> str:
        return self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]


def _the_task(config: Config, run: DebugRun) -> Task:
    inputs = config.buffer.explorer_input
    sets = [*inputs.tasksets, *inputs.eval_tasksets]
    wanted = [t for t in sets if run.taskset in (None, t.name)]
    if not wanted:
        names = ", ".join(taskset.name for taskset in sets) or "none"
        raise DebugError(f"No taskset is called {run.taskset!r}; there are: {names}.")
    taskset = wanted[0]
    _refuse_problems(taskset)
    opened = open_taskset(taskset)
    if not 0 <= run.task < len(opened):
        raise DebugError(f"--task is {run.task}, but {taskset.name!r} has {len(opened)} tasks.")
    task = opened.task(run.task)
    return replace(task, batch_id="debug", task_id=run.task, repeat_times=run.repeat)


def _refuse_problems(taskset: TasksetConfig) -> None:
    problems = list(check_workflow(taskset))
    if problems:
        key = f"taskset {taskset.name}"
        raise ConfigError(
            [Problem(f"{key}: {p.key}", p.message, p.fix, p.value, p.line) for p in problems]
        )


def _decoder(model: Any) -> Decode:
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return lambda ids: bytes(ids).decode(errors="replace")
    return lambda ids: str(tokenizer.decode(list(ids)))


def _show(
    console: Console,
    task: Task,
    result: UnitResult,
    experiences: Sequence[Experience],
    decode: Decode,
) -> None:
    """Each run's turns and errors, then a table. Texts are shown as they are, never as markup."""
    console.rule(Text(f"task {task.task_id}: {task.workflow}"))
    for experience in experiences:
        console.rule(Text(f"run {experience.eid.run}, step {experience.eid.step}"), style="dim")
        for turn in turns_of(experience, decode):
            console.print(Text(f"{turn.who}, {counted(turn.num_tokens, 'token')}", "bold"))
            console.print(Text(harmless(turn.text), "green" if turn.is_sampled else ""))
    for run in result.runs:
        for text in [*([run.error] if run.error else []), *run.dropped]:
            console.print(Text(f"run {run.run}: {harmless(text)}", "red"))
    console.print(_table(experiences))
    console.print(f"{result.seconds:.2f} s")


def _table(experiences: Sequence[Experience]) -> Table:
    table = Table(title="experiences")
    for column in ("run", "step", "prompt", "response", "trained", "cut", "reward", "metrics"):
        table.add_column(column)
    for e in experiences:
        assert e.action_mask is not None
        numbers = ", ".join(f"{name} {value:.3g}" for name, value in e.metrics.items())
        table.add_row(
            str(e.eid.run),
            str(e.eid.step),
            str(e.prompt_length),
            str(e.response_length),
            str(int(e.action_mask.sum())),
            e.truncate_status or "",
            "" if e.reward is None else f"{e.reward:.3g}",
            Text(numbers),
        )
    return table


async def _write(
    folder: Path,
    task: Task,
    result: UnitResult,
    experiences: Sequence[Experience],
    decode: Decode,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text(page_of(task, result, experiences, decode))
    database = folder / "experiences.db"
    with contextlib.suppress(FileNotFoundError):
        os.remove(database)
    config = ExperienceBufferConfig(
        name="debug_buffer",
        storage_type=StorageType.SQL,
        path=f"sqlite:///{database.resolve()}",
    )
    storage = make_storage(config)
    await storage.prepare()
    writer = get_buffer_writer(config, storage)
    await writer.acquire()
    await writer.write(list(experiences))
    await writer.release()
    await storage.close()
