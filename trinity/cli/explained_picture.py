"""The picture of a run that `trinity explain` draws."""

from trinity.common.config import Config, GPUSplit
from trinity.common.config.arithmetic import Arithmetic
from trinity.common.constants import Mode
from trinity.utils.words import counted, every


def picture(config: Config, numbers: Arithmetic, split: GPUSplit) -> str:
    """The loop of a run with its numbers on the arrows."""
    if not config.mode.explores:
        return _training_picture(numbers, split)
    gpus = counted(split.rollout, "GPU") if split.total else "engines"
    made = f"{numbers.tasks} tasks x {numbers.samples} samples"
    lines = [f"  tasks --[{made}]--> explorer ({gpus})"]
    if not config.mode.pairs:
        where = "metrics" if config.mode is Mode.BENCH else "experience buffer"
        lines.append(f"                  --[{numbers.experiences} experiences]--> {where}")
        return "\n".join(lines)
    trainer = counted(split.trainer, "GPU") if split.total else "1 process"
    steps = numbers.steps_per_explorer_step
    sync = config.synchronizer
    travel = f"weights, {sync.sync_method}, {every(sync.sync_interval)}"
    lines += [
        "    ^                 |",
        f"    |                 +--[{numbers.experiences} experiences]--> buffer",
        "    |                                             |",
        f"    |                {numbers.train_batch} a training step, {steps} for an explorer step",
        "    |                                             v",
        f"    +--[{travel}]-- trainer ({trainer})",
        "",
        f"  what is trained on is {_age(numbers.max_staleness)}",
    ]
    return "\n".join(lines)


def _training_picture(numbers: Arithmetic, split: GPUSplit) -> str:
    trainer = counted(split.trainer, "GPU") if split.total else "1 process"
    return f"  data set --[{numbers.train_batch} rows a step]--> trainer ({trainer})"


def _age(steps: int | None) -> str:
    if steps == 0:
        return "of the newest weights"
    return "of any age" if steps is None else f"at most {counted(steps, 'step')} old"
