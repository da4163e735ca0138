"""What of a run is evaluation, said before it starts: which tasks, when, and how to have less."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trinity.common.constants import Mode
from trinity.launcher.plan import RunPlan
from trinity.utils.words import every

if TYPE_CHECKING:
    from trinity.explorer.explorer import EvalTaskset  # brings PyTorch

_MANY_STEPS = 10
"""An evaluation of more samples than this many steps have takes most of a short run on a CPU."""


def evaluation_lines(
    plan: RunPlan, evals: "Sequence[EvalTaskset]", total_steps: int | None, is_resumed: bool = False
) -> Iterator[str]:
    """The evaluation sets of a run and when their turn is; on a CPU, a hint if they are long.

    Args:
        total_steps: Of the run, if that is known.
        is_resumed: It goes on from a checkpoint.
    """
    if not evals or plan.config.mode in (Mode.TRAIN, Mode.SERVE):
        return
    sets = ", ".join(map(_set_text, evals))
    yield f"evaluation: {sets}; {_times(plan, total_steps, is_resumed)}"
    if plan.config.mode is Mode.BENCH:
        return
    samples = sum(task.repeat_times for taskset in evals for task in taskset.tasks)
    step = plan.config.samples_per_step
    if plan.device == "cpu" and plan.config.mode.explores and samples > _MANY_STEPS * step:
        yield _hint(plan, samples / step, _has_first(plan, is_resumed))


def _set_text(taskset: "EvalTaskset") -> str:
    repeats = {task.repeat_times for task in taskset.tasks}
    times = f" x {repeats.pop()} samples" if repeats - {1} and len(repeats) == 1 else ""
    return f"{taskset.name} ({len(taskset.tasks):,} tasks{times})"


def _times(plan: RunPlan, total_steps: int | None, is_resumed: bool) -> str:
    explorer = plan.config.explorer
    if plan.config.mode is Mode.BENCH:
        which = "the newest" if explorer.bench_on_latest_checkpoint else "each"
        start = "the model itself and " if explorer.eval_on_startup else ""
        return f"for {start}{which} checkpoint"
    times = ["at the start"] if _has_first(plan, is_resumed) else []
    if total_steps is None or explorer.eval_interval < total_steps:
        times.append(every(explorer.eval_interval))
    return ", ".join([*times, "at the end"])


def _has_first(plan: RunPlan, is_resumed: bool) -> bool:
    """Whether there is an evaluation before the first step."""
    return plan.config.explorer.eval_on_startup and not is_resumed


def _hint(plan: RunPlan, steps: float, has_first: bool) -> str:
    first = "explorer.eval_on_startup=false for none at the start, " if has_first else ""
    split = plan.config.buffer.explorer_input.eval_tasksets[0].split.partition("[")[0]
    return (
        f"One evaluation takes as many samples as {steps:.0f} steps of training. Shorter: "
        f"{first}'buffer.explorer_input.eval_tasksets[0].split={split}[:100]' for 100 tasks of a "
        "set, buffer.explorer_input.eval_tasksets=[] for none at all."
    )
