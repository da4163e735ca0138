"""`trinity perf run`: the explorer alone for some steps, watched from beside."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trinity import __version__
from trinity.common.config import Config
from trinity.common.errors import TrinityError
from trinity.launcher.build import Parts
from trinity.launcher.hardware import cpu_cores, local_gpus
from trinity.launcher.launch import Job
from trinity.launcher.plan import RunPlan
from trinity.launcher.screen import Screen
from trinity.perf.report import PerfReport
from trinity.perf.sampler import Sampler


class MeasuringTooLongError(TrinityError):
    """The time that was given for the measuring is over."""


@dataclass(frozen=True)
class Measuring:
    """How to measure.

    Args:
        output: File of the report.
        every_s: Seconds between two samples of machine and engines.
        timeout_s: Seconds from the start of the engines after which the run is ended; None: none.
    """

    output: Path
    every_s: float = 2.0
    timeout_s: float | None = None


def measure(
    config: Config, plugin_dirs: Sequence[str], screen: Screen, measuring: Measuring
) -> int:
    """Run ``config`` of `explorer_alone` and write its report; the exit code of the process.

    The report is written however the run ends.

    Raises:
        TrinityError: The run can't start, fails, or takes too long.
    """
    started = time.time()
    job = Job(config, plugin_dirs, screen)
    job.plan()
    plan = job.plans[0]
    report = PerfReport(_meta(plan, measuring), _artifacts(plan), started)
    job.listeners = [report.listen]
    job.observe = lambda parts: _watched(parts, plan, report, measuring)
    try:
        code = job.run()
        report.state = "interrupted" if code else "finished"
        return code
    except BaseException as error:
        is_late = isinstance(error, MeasuringTooLongError)
        report.state = "timeout" if is_late else "failed"
        report.error = f"{type(error).__name__}: {error}"
        raise
    finally:
        report.write(measuring.output)
        screen.say(f"report  {measuring.output}")
        screen.say(f"look    trinity perf view -r {measuring.output}")


@asynccontextmanager
async def _watched(
    parts: Parts, plan: RunPlan, report: PerfReport, measuring: Measuring
) -> AsyncIterator[None]:
    """While this lasts, machine and engines are sampled into ``report``; it ends in time."""
    await _no_trainer(parts, plan)
    engines = parts.explorer.engines if parts.explorer is not None else ()
    sampler = Sampler(engines, measuring.every_s, report.started)
    report.samples, report.engine_failures = sampler.samples, sampler.failures
    watch = asyncio.create_task(sampler.watch())
    try:
        async with asyncio.timeout(measuring.timeout_s) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():  # something else took too long
            raise
        raise MeasuringTooLongError(
            f"Ended by --timeout after {measuring.timeout_s:g} s; {len(report.whole_steps)} of "
            f"{plan.config.buffer.total_steps} steps were done."
        ) from error
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch


async def _no_trainer(parts: Parts, plan: RunPlan) -> None:
    """Tell the explorer that no weights will come, so that it waits for none at its end."""
    plan.job.weights.mkdir(parents=True, exist_ok=True)
    await parts.board.close("only the explorer is measured")


def _meta(plan: RunPlan, measuring: Measuring) -> dict[str, object]:
    config = plan.config
    model, buffer = config.explorer.rollout_model, config.buffer
    return {
        "module": "explorer",
        "config": config.source.path,
        "project": config.project,
        "name": config.name,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "total_steps": buffer.total_steps,
        "monitor_interval_s": measuring.every_s,
        "timeout_s": measuring.timeout_s,
        "model_path": model.model_path or config.model.model_path,
        "engine_type": str(model.engine_type),
        "engine_num": model.engine_num,
        "batch_size": buffer.batch_size,
        "repeat_times": config.algorithm.repeat_times,
        "max_prompt_tokens": model.max_prompt_tokens,
        "max_response_tokens": model.max_response_tokens,
        "runner_processes": plan.num_runners,
        "workflows_per_process": plan.slots,
        "host": platform.node(),
        "cpu_cores": cpu_cores(),
        "gpus": local_gpus(),
        "python": platform.python_version(),
        "trinity": __version__,
        "pid": os.getpid(),
    }


def _artifacts(plan: RunPlan) -> dict[str, str]:
    job = plan.job
    return {
        "job": str(job.path),
        "logs": plan.config.log.save_dir,
        "tensorboard": str(job.monitor / "tensorboard"),
        "config": str(job.path / "config.yaml"),
        "experiences": str(job.buffer),
    }
