"""Compile the CPU kernels while the parts of a run import PyTorch, if they are not there yet."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import trinity.common
from trinity.common.constants import EngineType, TrainerType
from trinity.launcher.plan import RunPlan

# As a file: to import it as a module would import PyTorch.
_PROGRAM = Path(trinity.common.__file__).parent / "models" / "kernels" / "library.py"


@contextmanager
def compiling_ahead(plans: Sequence[RunPlan]) -> Iterator[None]:
    """Compile beside the block, in a process that does not outlive it, if a plan needs it."""
    if not any(map(_needs_kernels, plans)):
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-P", str(_PROGRAM)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _needs_kernels(plan: RunPlan) -> bool:
    config = plan.config
    samples = config.explorer.rollout_model.engine_type is EngineType.TORCH
    trains = config.trainer.trainer_type is TrainerType.TORCH
    return plan.device == "cpu" and (
        (config.mode.explores and samples) or (config.mode.trains and trains)
    )
